"""The rows that are measured on one GPU: what is run, and in which unit.

Contract: random token ids, greedy, end-of-text ignored, no text on either side. Times are wall time from the first
request handed in to the last token read; best of the repeats. ``seconds(prompt_lens, output_lens)`` is an engine.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Seconds = Callable[[Sequence[int], Sequence[int]], float]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        name: what the command line calls it.
        unit: ``tok/s`` (more is better) or ``ms`` (less is better).
        measure: the figure, given an engine and a number of repeats.
    """

    name: str
    unit: Literal["tok/s", "ms"]
    measure: Callable[[Seconds, int], float]


def _best(seconds: Seconds, repeats: int, prompt_lens: Sequence[int], output_lens: Sequence[int]) -> float:
    return min(seconds(prompt_lens, output_lens) for _ in range(repeats))


def _lone_decode(seconds: Seconds, repeats: int) -> float:
    """The difference of two lengths, so that the prompt cancels."""
    shorter, longer = (_best(seconds, repeats, [128], [n]) for n in (33, 289))
    return 256 / (longer - shorter)


def _batch(size: int) -> Callable[[Seconds, int], float]:
    def measure(seconds: Seconds, repeats: int) -> float:
        seconds([128] * size, [4] * size)
        return size * 128 / _best(seconds, repeats, [128] * size, [128] * size)

    return measure


def _long_context(seconds: Seconds, repeats: int) -> float:
    shorter, longer = (_best(seconds, repeats, [1024] * 64, [n] * 64) for n in (2, 130))
    return 64 * 128 / (longer - shorter)


def _first_token(length: int) -> Callable[[Seconds, int], float]:
    def measure(seconds: Seconds, repeats: int) -> float:
        seconds([length], [1])
        return 1e3 * _best(seconds, repeats, [length], [1])

    return measure


def _prefill(seconds: Seconds, repeats: int) -> float:
    return 65_536 / _best(seconds, repeats, [1024] * 64, [1] * 64)


def _mixed(seconds: Seconds, repeats: int) -> float:
    rng = random.Random(0)
    prompts, outputs = ([rng.randint(100, 1024) for _ in range(256)] for _ in range(2))
    return sum(outputs) / _best(seconds, repeats, prompts, outputs)


ROWS = {
    row.name: row
    for row in (
        Row("decode-1", "tok/s", _lone_decode),
        *(Row(f"batch-{n}", "tok/s", _batch(n)) for n in (8, 32, 64, 128, 256)),
        Row("decode-64-at-1k", "tok/s", _long_context),
        Row("ttft-1k", "ms", _first_token(1024)),
        Row("ttft-8k", "ms", _first_token(8192)),
        Row("prefill", "tok/s", _prefill),
        Row("mixed-256", "tok/s", _mixed),
    )
}
