"""Random traffic: requests of every kind, when they arrive and leave, and an engine too small for them.

Contract: a traffic is a function of the ``random.Random`` that it is drawn from; Hypothesis' own (``st.randoms()``)
makes one that shrinks. Whatever the traffic, each request must get what it gets alone: ``check_traffic`` says whether
it does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from mini_infer.messages import EngineRequest
from mini_infer.sampling_params import SamplingParams
from mini_infer.testing.engines import assert_idle, run_engine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mini_infer.engine import Engine
    from mini_infer.testing.engines import EngineOutput
    from mini_infer.testing.reference import Equality

MAX_MODEL_LEN = 48


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests over time.

    Attributes:
        requests: in order of arrival.
        arrivals: before which step each is added.
        aborts: request id -> before which step it is aborted.
        engine: settings of the table ``[engine]`` that make it tight.
    """

    requests: list[EngineRequest]
    arrivals: list[int]
    aborts: Mapping[str, int] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        lines = [f"at {when}: {request}" for when, request in zip(self.arrivals, self.requests, strict=True)]
        return "\n  ".join(["Traffic", f"engine {dict(self.engine)}", f"aborts {dict(self.aborts)}", *lines])


def random_traffic(rng: Random, vocab_size: int) -> Traffic:
    """Up to a dozen requests that share prompts now and then, on an engine with hardly a block to spare."""
    stems = [_tokens(rng, rng.randint(1, 30), vocab_size) for _ in range(2)]
    requests: list[EngineRequest] = []
    arrivals: list[int] = []
    now = 0
    for index in range(rng.randint(1, 7)):
        now += rng.choice([0, 0, 0, 1, 2, 5])
        request = _request(rng, f"r{index}", stems, vocab_size)
        num_choices = rng.choice([1, 1, 1, 1, 2, 3])
        for choice in range(num_choices):
            requests.append(_choice(request, choice))
            arrivals.append(now)
    aborts = {request.request_id: rng.randint(0, now + 20) for request in requests if rng.randint(0, 7) == 7}
    return Traffic(requests, arrivals, aborts, _tight_engine(rng, requests))


def _choice(request: EngineRequest, choice: int) -> EngineRequest:
    import msgspec

    return msgspec.structs.replace(request, request_id=f"{request.request_id}-{choice}", choice=choice)


def _tokens(rng: Random, count: int, vocab_size: int) -> list[int]:
    return Random(rng.randint(0, 2**32 - 1)).choices(range(vocab_size), k=count)


def _request(rng: Random, request_id: str, stems: list[list[int]], vocab_size: int) -> EngineRequest:
    prompt = _tokens(rng, rng.randint(1, 30), vocab_size)
    if rng.randint(0, 3) == 3:
        stem = rng.choice(stems)
        prompt = (stem[: rng.randint(1, len(stem))] + prompt[: rng.randint(0, 4)])[:30]
    scores_only = rng.randint(0, 15) == 15
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=_params(rng, 0 if scores_only else rng.randint(1, 16), vocab_size),
        eos_token_ids=rng.choice([[], _tokens(rng, 12, vocab_size)]),
        seed=rng.choice([0, 1, 2**64 - 1, rng.randint(0, 2**64 - 1)]),
        priority=rng.randint(-2, 2),
    )


def _params(rng: Random, max_tokens: int, vocab_size: int) -> SamplingParams:
    def maybe(value: Any, otherwise: Any, one_in: int = 3) -> Any:
        return value if rng.randint(1, one_in) == one_in else otherwise

    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.5, 1.0, 1.0, 2.0]),
        top_k=maybe(rng.choice([1, 5, 40, vocab_size + 1]), 0),
        top_p=maybe(rng.choice([0.0, 0.3, 0.9]), 1.0),
        min_p=maybe(rng.choice([0.01, 0.2]), 0.0),
        repetition_penalty=maybe(rng.choice([0.7, 1.3, 2.0]), 1.0),
        presence_penalty=maybe(rng.choice([-1.0, 1.5]), 0.0),
        frequency_penalty=maybe(rng.choice([-2.0, 0.7, 2.0]), 0.0),
        logit_bias=maybe(dict.fromkeys(_tokens(rng, rng.randint(1, 9), vocab_size), rng.choice([-100, 2.5, 6])), {}),
        max_tokens=max_tokens,
        min_tokens=maybe(rng.randint(0, 10), 0),
        stop_token_ids=maybe(_tokens(rng, 15, vocab_size), []),
        ignore_eos=maybe(True, False),
        logprobs=maybe(rng.choice([0, 1, 3]), None),
        prompt_logprobs=maybe(rng.choice([0, 2]), None, 5),
    )


def _tight_engine(rng: Random, requests: list[EngineRequest]) -> dict[str, Any]:
    block_size = rng.choice([1, 2, 3, 4, 4, 8, 16])
    longest = max(len(request.prompt_token_ids) + (request.params.max_tokens or 0) for request in requests)
    return {
        "block_size": block_size,
        "num_kv_blocks": -(-longest // block_size) + rng.choice([0, 0, 1, 2, 5, 20]),
        "max_num_seqs": rng.choice([1, 2, 3, 4, 8]),
        "max_num_batched_tokens": rng.choice([1, 4, 7, 16, 32, 64]),
        "max_model_len": MAX_MODEL_LEN,
    }


def check_traffic(engine: Engine, traffic: Traffic, equality: Equality) -> dict[str, EngineOutput]:
    """Run a traffic and prove that every request got its own tokens and that nothing is held at the end.

    Raises:
        AssertionError, EngineError: it did not.
    """
    outputs = run_engine(engine, traffic.requests, traffic.arrivals, traffic.aborts)
    equality.check(traffic.requests, outputs)
    assert_idle(engine)
    stats = engine.stats()
    aborted = sum(output.finish_reason == "abort" for output in outputs.values())
    assert stats.num_aborted == aborted, f"{aborted} requests were aborted, {stats.num_aborted} counted"
    assert aborted <= len(traffic.aborts), f"{aborted} requests were aborted, {len(traffic.aborts)} should have been"
    assert stats.num_finished == len(outputs) - aborted, f"{stats.num_finished} of {len(outputs)} counted as finished"
    return outputs
