"""Observer: the step's events, once a step, for metrics and traces."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """Something that happened to a request: arrived, admitted, preempted, finished, aborted."""

    kind: str
    request_id: str
    at: float
    detail: dict[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepEvents:
    """One step as it was.

    Attributes:
        step_id: its number.
        started, ended: seconds on the engine's clock.
        num_running, num_waiting: requests after the step.
        num_tokens: tokens run, drafts counted.
        num_sampled: tokens drawn and kept.
        num_drafted, num_accepted: drafts verified and kept.
        num_free_blocks, num_total_blocks: device tier.
        seconds: time by part (schedule, forward, sample, update).
        requests: what happened to requests since the last step.
    """

    step_id: int
    started: float
    ended: float
    num_running: int
    num_waiting: int
    num_tokens: int
    num_sampled: int
    num_drafted: int
    num_accepted: int
    num_free_blocks: int
    num_total_blocks: int
    seconds: dict[str, float]
    requests: Sequence[RequestEvent]


class Observer(ABC):
    """Called once a step, after it was read."""

    @abstractmethod
    def step(self, events: StepEvents) -> None:
        """Must not block: the next step waits."""
