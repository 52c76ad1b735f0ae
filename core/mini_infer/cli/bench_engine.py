"""Measurements on an engine in this process.

Contract: every request is random token ids, decoded greedily to its full length.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from mini_infer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mini_infer.llm import LLM
    from mini_infer.outputs import RequestOutput


def measure_latency(llm: LLM, batch_size: int, input_len: int, output_len: int, iterations: int) -> dict[str, float]:
    """Returns the figures of the fastest of several runs of one batch.

    Raises:
        RequestError: the lengths do not fit the model.
    """
    draw = random.Random(0)
    params = _params(output_len)
    _run(llm, draw, [input_len] * batch_size, params)
    best = float("inf")
    for _ in range(iterations):
        seconds, outputs = _run(llm, draw, [input_len] * batch_size, params)
        if seconds < best:
            best, first = seconds, _first_token_seconds(outputs)
    decoding = max(best - first, 1e-9)
    return {
        "latency, s": best,
        "time to first token, ms": 1e3 * first,
        "decode, tok/s": batch_size * (output_len - 1) / decoding,
        "output, tok/s": batch_size * output_len / best,
    }


def measure_throughput(llm: LLM, num_prompts: int, input_len: int, output_len: int) -> dict[str, float]:
    """Returns the figures of many requests whose lengths are drawn from half of the lengths given to all of them.

    Raises:
        RequestError: the lengths do not fit the model.
    """
    draw = random.Random(0)
    _run(llm, draw, [input_len], _params(min(8, output_len)))
    lengths = [draw.randint(max(1, input_len // 2), input_len) for _ in range(num_prompts)]
    each = [_params(draw.randint(max(1, output_len // 2), output_len)) for _ in range(num_prompts)]
    seconds, outputs = _run(llm, draw, lengths, each)
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "requests/s": num_prompts / seconds,
        "output, tok/s": generated / seconds,
        "prompt + output, tok/s": (sum(lengths) + generated) / seconds,
        "seconds": seconds,
    }


def _params(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)


def _run(
    llm: LLM, draw: random.Random, lengths: list[int], params: SamplingParams | list[SamplingParams]
) -> tuple[float, list[RequestOutput]]:
    facts, tokenizer = llm.frontend.facts, llm.frontend.tokenizer
    known = range(facts.vocab_size)
    ids = known if tokenizer is None else [i for i in known if i in tokenizer.valid_ids]
    prompts = [draw.choices(ids, k=length) for length in lengths]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return time.perf_counter() - start, outputs


def _first_token_seconds(outputs: list[RequestOutput]) -> float:
    seconds = [output.metrics.time_to_first_token for output in outputs]
    return max(value for value in seconds if value is not None)
