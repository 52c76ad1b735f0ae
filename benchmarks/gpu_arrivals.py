"""Requests that arrive while others run, on our engine in process."""

import random
import time
from typing import Any

from benchmarks.engines.gpu_offline import build
from benchmarks.gpu_models import SHAPES


def start(model: str, cap: int) -> Any:
    """An engine with its default plugins."""
    import gc

    built = build(model, {"chunked-prefill": {"max_tokens_beside_decodes": cap}})
    gc.freeze()
    return built.engine


def make_request(name: str, model: str, num_tokens: int, max_tokens: int, rng: random.Random) -> Any:
    """A greedy request of random tokens."""
    from mini_infer.messages import EngineRequest
    from mini_infer.sampling_params import SamplingParams

    prompt = [rng.randrange(1, SHAPES[model]["vocab_size"] - 1000) for _ in range(num_tokens)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params)


def long_prompt(engine: Any, model: str, length: int, rng: random.Random) -> tuple[float, float]:
    """Milliseconds: longest gap between two tokens of a decoder from the prompt's arrival on, and its first token's."""
    for i in range(7):
        engine.add_request(make_request(f"decoder {i}", model, 128, 220, rng))
    late = make_request("late", model, length, 2, rng)
    for _ in range(40):
        engine.step()
    arrived = time.perf_counter()
    last = dict.fromkeys((f"decoder {i}" for i in range(7)), arrived)
    engine.add_request(late)
    gaps: list[float] = []
    first_token = None
    while engine.has_work():
        deltas = engine.step()
        now = time.perf_counter()
        for delta in deltas:
            if delta.request_id == "late":
                first_token = first_token or now - arrived
            elif first_token is None or now - arrived < first_token + 0.03:
                gaps.append(now - last[delta.request_id])
                last[delta.request_id] = now
    assert first_token is not None
    return 1e3 * max(gaps), 1e3 * first_token


def clients(engine: Any, model: str, count: int, rng: random.Random) -> float:
    """Output tokens a second of ``count`` clients, three requests of 128 in and 128 out each."""
    requests = [make_request(str(i), model, 128, 128, rng) for i in range(3 * count)]
    num_tokens = 0
    started = time.perf_counter()
    for request in requests[:count]:
        engine.add_request(request)
    waiting = iter(requests[count:])
    while engine.has_work():
        for delta in engine.step():
            num_tokens += len(delta.token_ids)
            if delta.finish_reason is not None and (request := next(waiting, None)) is not None:
                engine.add_request(request)
    return num_tokens / (time.perf_counter() - started)
