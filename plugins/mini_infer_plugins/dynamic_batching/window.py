"""WindowScheduler: holds new requests back for a moment, so that prompts of like length run in one step.

::

    arrivals ──> groups by length (1, 2-3, 4-7, ... tokens) ──> closed ──> the scheduler inside
                   each with its own window

Contract: it hides waiting requests from the scheduler inside and decides nothing else. A group closes when its oldest
has waited for the window, when it fills a step or all free slots, when a deadline in it nears, or when the device
would idle; then the group of the most urgent closes. Urgent requests and those that start over are never held. So
nobody waits longer than the window for being held.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mini_infer.interfaces import RequestView, Schedule, Scheduler, SchedulerView


@dataclass(frozen=True, slots=True)
class Window:
    """When a group closes, in seconds.

    Attributes:
        busy: after its oldest arrived, while other requests run.
        idle: the same, while the device has nothing to do.
        margin: before a deadline.
        urgent_priority: requests of this priority or a more urgent one are not held.
    """

    busy: float
    idle: float
    margin: float
    urgent_priority: int


class WindowScheduler(Scheduler):
    """See the module.

    Args:
        inside: the scheduler that sees what is not held.
        window: when groups close.
    """

    def __init__(self, inside: Scheduler, window: Window) -> None:
        self._inside = inside
        self._window = window
        self._released: set[str] = set()  # waiting, and no longer held

    def schedule(self, view: SchedulerView) -> Schedule:
        """See ``Scheduler.schedule``."""
        idle = not view.running and not view.num_in_flight
        groups = self._held(view.waiting)
        closing = {length: self._closes_at(group, idle) for length, group in groups.items()}
        closed = [length for length, at in closing.items() if at <= view.now or _fills(groups[length], view)]
        self._released.update(request.request_id for length in closed for request in groups[length])
        visible = [request for request in view.waiting if self._is_free(request)]
        schedule = self._inside.schedule(replace(view, waiting=visible))
        if schedule.wishes or not idle:
            return schedule
        moments = [at for length, at in closing.items() if length not in closed]
        moments += [] if schedule.wake_at is None else [schedule.wake_at]
        return Schedule(schedule.wishes, min(moments, default=None))

    def victim(self, asker: RequestView, candidates: Sequence[RequestView]) -> RequestView:
        """See ``Scheduler.victim``."""
        return self._inside.victim(asker, candidates)

    def _held(self, waiting: Sequence[RequestView]) -> dict[int, list[RequestView]]:
        """Those that are held, by length: the power of two below their tokens to do."""
        self._released &= {request.request_id for request in waiting}
        groups: dict[int, list[RequestView]] = {}
        for request in waiting:
            if not self._is_free(request):
                groups.setdefault(request.num_tokens_to_do.bit_length(), []).append(request)
        return groups

    def _is_free(self, request: RequestView) -> bool:
        urgent = request.priority <= self._window.urgent_priority
        return urgent or request.num_preemptions > 0 or request.request_id in self._released

    def _closes_at(self, group: Sequence[RequestView], idle: bool) -> float:
        length = self._window.idle if idle else self._window.busy
        moments = [request.arrival + length for request in group]
        moments += [request.deadline - self._window.margin for request in group if request.deadline is not None]
        return min(moments)


def _fills(group: Sequence[RequestView], view: SchedulerView) -> bool:
    tokens = sum(request.num_tokens_to_do for request in group)
    return tokens >= view.token_budget or len(group) >= view.max_num_seqs - view.num_running
