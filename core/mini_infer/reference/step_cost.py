"""StepCost: what a step costs, learned from the steps that were. For chunk policies with a time to keep.

A step takes ``base + token * tokens + pair * pairs`` seconds, where ``pairs`` counts, for each token run, the tokens
before its chunk. Least squares over past steps, old ones fading, fit the three.

Contract: the only clock is the view's, so replay works. A step's duration is the time from one view to the next, and
counts only if a request was running in both, for else the engine may have slept between.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mini_infer.interfaces.scheduler import RequestView, SchedulerView

_TOKENS, _PAIRS = 1e3, 1e6  # units in which the three features are of like size
_FADE = 0.98  # a step counts half after 34 others
_ENOUGH = 8  # steps before a prediction is trusted


@dataclass(slots=True)
class _Running:
    """What the current step runs, as far as its policy has said."""

    now: float
    request_ids: frozenset[str]
    tokens: float
    pairs: float


class StepCost:
    """See the module. ``begin_step`` once a step, then ``add`` for each prompt's chunk."""

    def __init__(self) -> None:
        self._step: _Running | None = None
        self._moments = [[1e-9 if i == j else 0.0 for j in range(3)] for i in range(3)]  # of (1, tokens, pairs)
        self._products = [0.0, 0.0, 0.0]  # of the same with the duration
        self._weights: tuple[float, float, float] | None = None
        self._num_steps = 0

    def begin_step(self, view: SchedulerView) -> None:
        """Learn from the last step; count this one's decodes."""
        last, ids = self._step, frozenset(request.request_id for request in view.running)
        if last is not None and last.tokens and not last.request_ids.isdisjoint(ids):
            self._learn((1.0, last.tokens / _TOKENS, last.pairs / _PAIRS), view.now - last.now)
        decodes = [request for request in view.running if request.num_tokens_to_do == 1]
        self._step = _Running(view.now, ids, len(decodes), sum(request.num_tokens for request in decodes))

    def add(self, request: RequestView, num_tokens: int) -> None:
        """This step runs so many tokens of a prompt."""
        if self._step is not None:
            self._step.request_ids |= {request.request_id}
            self._step.tokens += num_tokens
            self._step.pairs += num_tokens * _history(request)

    def seconds(self, tokens: float, pairs: float) -> float | None:
        """Of a step; None while too few have been seen."""
        if self._weights is None:
            return None
        base, token, pair = self._weights
        return base + token * tokens / _TOKENS + pair * pairs / _PAIRS

    def tokens_within(self, seconds: float, request: RequestView) -> int | None:
        """Tokens of a prompt that the current step can still take and end in time; None while nothing is known."""
        if self._step is None or self._weights is None:
            return None
        spent = self.seconds(self._step.tokens, self._step.pairs) or 0.0
        _, token, pair = self._weights
        price = token / _TOKENS + pair * _history(request) / _PAIRS
        return int((seconds - spent) / price) if price > 0 else request.num_tokens_to_do

    def _learn(self, features: tuple[float, float, float], seconds: float) -> None:
        for i, one in enumerate(features):
            self._products[i] = _FADE * self._products[i] + one * seconds
            for j, other in enumerate(features):
                self._moments[i][j] = _FADE * self._moments[i][j] + one * other
        self._num_steps += 1
        if self._num_steps >= _ENOUGH:
            self._weights = _non_negative(self._moments, self._products)


def _history(request: RequestView) -> int:
    return request.num_tokens - request.num_tokens_to_do


def _non_negative(moments: list[list[float]], products: list[float]) -> tuple[float, float, float]:
    """Least squares with no weight below 0: one that would be is taken out, the lowest first."""
    kept = [0, 1, 2]
    while kept:
        solution = _solve([[moments[i][j] + (1e-6 if i == j else 0.0) for j in kept] for i in kept], products, kept)
        if min(solution) >= 0:
            weights = dict(zip(kept, solution, strict=True))
            return weights.get(0, 0.0), weights.get(1, 0.0), weights.get(2, 0.0)
        kept.pop(solution.index(min(solution)))
    return 0.0, 0.0, 0.0


def _solve(matrix: list[list[float]], products: list[float], kept: Sequence[int]) -> list[float]:
    """Gauss and Jordan, for a symmetric positive definite matrix: no pivot is 0."""
    rows = [[*row, products[i]] for row, i in zip(matrix, kept, strict=True)]
    for i, pivot in enumerate(rows):
        pivot[:] = [value / pivot[i] for value in pivot]
        for other in rows:
            if other is not pivot:
                factor = other[i]
                other[:] = [value - factor * scale for value, scale in zip(other, pivot, strict=True)]
    return [row[-1] for row in rows]
