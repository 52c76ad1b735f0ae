"""Requests that arrive while others run, on an engine in this process.

Contract: the same requests in the same order on every engine; times are this process's, from handing in to reading.
"""

import gc
import random
import time
from collections.abc import Iterator

from benchmarks.engines.gpu_offline import Stepped
from benchmarks.gpu_models import random_prompts

LONG = {"1k": 1024, "8k": 8192}
CLIENTS = (1, 8, 64, 256)
DECODERS, DECODER_TOKENS, STEPS_BEFORE = 7, 220, 40
AFTERWARDS = 0.03
"""Seconds behind the long prompt's first token in which gaps still count."""


def measure(engine: Stepped, model: str, repeats: int, *, scale: int = 1) -> Iterator[tuple[str, str, float]]:
    """Name, unit and best of ``repeats``, one figure after another.

    Args:
        engine: started.
        model: one of ``SHAPES``.
        repeats: of each, behind one that warms up.
        scale: prompts, outputs and clients are divided by it, to try the code out.
    """
    gc.collect()
    gc.freeze()  # a collection walks half a million objects of torch's, in the middle of a step
    for name, length in LONG.items():
        gap, first_token = min([long_prompt(engine, model, length // scale) for _ in range(1 + repeats)][1:])
        yield f"gap-at-{name}", "ms", 1e3 * gap
        yield f"late-ttft-{name}", "ms", 1e3 * first_token  # of the same run
    for count in CLIENTS:
        clients(engine, model, max(1, count // scale), 4)
        yield f"clients-{count}", "tok/s", max(clients(engine, model, max(1, count // scale)) for _ in range(repeats))


def long_prompt(engine: Stepped, model: str, length: int) -> tuple[float, float]:
    """Seconds: the longest gap between two tokens of a decoder that ends behind the prompt's arrival, its first token.

    Seven decoders, 128 tokens in; the prompt arrives in their midst.
    """
    prompts = random_prompts(model, [128] * DECODERS + [length], random.Random(length))
    for index in range(DECODERS):
        engine.add(f"decoder{index}", prompts[index], DECODER_TOKENS)
    last: dict[str, float] = {}
    for _ in range(STEPS_BEFORE):
        for name, _, _ in engine.step():
            last[name] = time.perf_counter()
    assert len(last) == DECODERS, f"only {sorted(last)} decode when the prompt arrives"
    arrived, first_token, longest = time.perf_counter(), None, 0.0
    engine.add("late", prompts[-1], 2)
    while engine.has_work():
        outputs = engine.step()
        now = time.perf_counter()
        for name, num_tokens, _ in outputs:
            if name == "late" and num_tokens and first_token is None:
                first_token = now - arrived
        for name, num_tokens, _ in outputs:
            if name != "late" and num_tokens:
                if first_token is None or now - arrived <= first_token + AFTERWARDS:
                    longest = max(longest, now - last[name])
                last[name] = now
    assert first_token is not None
    return longest, first_token


def clients(engine: Stepped, model: str, count: int, num_output: int = 128) -> float:
    """Output tokens a second of ``count`` clients that send their next request when the last is answered.

    Three requests each, 128 tokens in.
    """
    prompts = iter(random_prompts(model, [128] * (3 * count), random.Random(count)))
    total, sent = 0, count
    started = time.perf_counter()
    for index in range(count):
        engine.add(str(index), next(prompts), num_output)
    while engine.has_work():
        for _, num_tokens, ended in engine.step():
            total += num_tokens
            if ended and (prompt := next(prompts, None)) is not None:
                engine.add(str(sent), prompt, num_output)
                sent += 1
    elapsed = time.perf_counter() - started
    assert total == 3 * count * num_output, f"{total} tokens of {3 * count} requests of {num_output}"
    return total / elapsed
