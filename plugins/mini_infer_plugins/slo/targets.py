"""Targets, and Goodput: which requests kept theirs.

Contract: times are those of the step loop's clock. A token counts from the step after it was granted, so what is
measured is off by less than a step from what a client sees.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from mini_infer.interfaces import Observer, RequestView, SchedulerView, StepEvents

logger = logging.getLogger("mini_infer")


@dataclass(frozen=True, slots=True)
class Targets:
    """Of one class of requests, in seconds.

    Attributes:
        ttft: from arrival to the first token.
        itl: largest gap between tokens.
    """

    ttft: float
    itl: float


@dataclass(frozen=True, slots=True)
class Classes:
    """The targets of each class; a request's class is its priority."""

    default: Targets
    by_priority: Mapping[int, Targets]

    def of(self, request: RequestView) -> Targets:
        """A request's targets."""
        return self.by_priority.get(request.priority, self.default)

    def due(self, request: RequestView) -> float:
        """When its first token is due: by its class, or by its own deadline where that is sooner."""
        due = request.arrival + self.of(request).ttft
        return due if request.deadline is None else min(due, request.deadline)


@dataclass(slots=True)
class _Seen:
    num_output_tokens: int
    at: float  # of its last token
    kept: bool


class Goodput(Observer):
    """Counts the requests that ended, and of those the ones whose every target was met.

    Args:
        classes: the targets.
        log_every: seconds between two lines in the log.

    Attributes:
        classes: as given.
        num_ended, num_good: so far.
    """

    name = "slo-goodput"

    def __init__(self, classes: Classes, log_every: float = 60.0) -> None:
        self.classes = classes
        self._log_every = log_every
        self._logged = float("-inf")
        self._seen: dict[str, _Seen] = {}
        self.num_ended = 0
        self.num_good = 0

    def begin_step(self, view: SchedulerView) -> None:
        """Look at who got a token since the last step."""
        for request in view.running:
            seen = self._seen.get(request.request_id)
            if seen is None:
                seen = self._seen[request.request_id] = _Seen(0, request.arrival, True)
            if request.num_output_tokens > seen.num_output_tokens:
                targets = self.classes.of(request)
                limit = seen.at + targets.itl if seen.num_output_tokens else self.classes.due(request)
                seen.kept &= view.now <= limit
                seen.num_output_tokens, seen.at = request.num_output_tokens, view.now

    def step(self, events: StepEvents) -> None:
        """See ``Observer.step``: requests that ended are judged."""
        for event in events.requests:
            if event.kind == "finished":
                seen = self._seen.pop(event.request_id, None)
                self.num_ended += 1
                self.num_good += seen is not None and seen.kept and event.detail["finish_reason"] != "error"
            elif event.kind == "aborted":
                self._seen.pop(event.request_id, None)
        if self.num_ended and events.ended >= self._logged + self._log_every:
            self._logged = events.ended
            logger.info("goodput: %d of %d requests kept their targets", self.num_good, self.num_ended)
