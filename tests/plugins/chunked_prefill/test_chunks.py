"""Chunked prefill: the scheduler's contract, tokens as without it, and what a step runs."""

from random import Random

from mini_infer.interfaces import SamplingParams
from mini_infer.messages import EngineRequest
from mini_infer.reference.scheduler import ArrivalOrder, ComposedScheduler, LastArrived
from mini_infer.testing import make_engine, run_engine
from mini_infer.testing.contracts import scheduler_suite
from mini_infer_plugins.chunked_prefill.chunks import ChunksBesideDecodes


def composed(most: int = 5) -> ComposedScheduler:
    return ComposedScheduler(ArrivalOrder(), LastArrived(), ChunksBesideDecodes(most))


TestContract = scheduler_suite(composed)


def request(name: str, num_tokens: int, max_tokens: int = 12) -> EngineRequest:
    rng = Random(name)
    prompt = [rng.randrange(1, 100) for _ in range(num_tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params)


def steps_of(most: int) -> tuple[list[int], dict[str, list[int]]]:
    """Tokens run in each step, and each request's tokens: a decoder, and a long prompt that arrives beside it."""
    settings = {"chunked-prefill": {"max_tokens_beside_decodes": most}}
    engine = make_engine("llama", plugins=["chunked-prefill"], plugin=settings, max_model_len=128).engine
    sizes: list[int] = []
    execute = engine._execute
    engine._execute = lambda plan, requests: (sizes.append(plan.num_tokens), execute(plan, requests))[1]  # type: ignore[method-assign]
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    engine.add_request(request("a", 3))
    for step in range(200):
        if step == 2:
            engine.add_request(request("b", 40))
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
        if not engine.has_work():
            break
    return sizes, tokens


def test_a_prompt_is_cut_beside_a_decode_and_whole_alone() -> None:
    sizes, tokens = steps_of(9)
    # b: 40 tokens, 8 a step beside a's one; then both decode.
    assert sizes[:8] == [3, 1, 9, 9, 9, 9, 9, 2]
    assert tokens == steps_of(1000)[1]
    assert steps_of(1000)[0][:4] == [3, 1, 41, 2]


def test_alone_a_prompt_is_whole() -> None:
    engine = make_engine("llama", plugins=["chunked-prefill"], max_model_len=128).engine
    assert len(run_engine(engine, [request("a", 100, 1)])["a"].token_ids) == 1
