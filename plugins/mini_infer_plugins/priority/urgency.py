"""UrgentFirst and LeastUrgent: a request's rank is its priority, bettered by the time since it arrived.

Contract: a second counts the same for all, so who goes before whom never changes once both are there: rank is
``priority * ageing + arrival``, and nothing has to be sorted anew as time passes. A request of priority p is overtaken
only by those that arrive less than ``(p - q) * ageing`` seconds after it with a priority q more urgent: its wait is
bounded by the work that arrives in that time.
"""

from collections.abc import Sequence

from mini_infer.interfaces import OrderPolicy, RequestView, VictimPolicy


def rank(request: RequestView, ageing: float) -> tuple[float, float, str]:
    """The lower, the sooner: the moment at which a request of priority 0 would have had to arrive to be its equal."""
    return request.priority * ageing + request.arrival, request.arrival, request.request_id


class UrgentFirst(OrderPolicy):
    """See the module.

    Args:
        ageing: seconds of waiting that are worth one step of priority.
    """

    name = "priority"
    ranks_running = True

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """By rank."""
        return sorted(waiting, key=lambda request: rank(request, self._ageing))


class LeastUrgent(VictimPolicy):
    """Whoever is last in rank yields, be it the asker: an urgent request takes the blocks of a less urgent one.

    Args:
        ageing: as for ``UrgentFirst``.
    """

    name = "priority"

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing

    def victim(self, asker: RequestView, candidates: Sequence[RequestView]) -> RequestView:
        """The last of all in rank."""
        return max((asker, *candidates), key=lambda request: rank(request, self._ageing))
