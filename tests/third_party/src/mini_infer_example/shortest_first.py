"""Short prompts first: an order of waiting requests, and a scheduler made of it and two policies of the core."""

from collections.abc import Sequence

from mini_infer.interfaces import OrderPolicy, RequestView, Scheduler
from mini_infer.reference.scheduler import ComposedScheduler, LastArrived, WholePrompts


class ShortestFirst(OrderPolicy):
    """Fewest tokens left to compute first, less what each has waited.

    Args:
        ageing: tokens a second. A prompt of L tokens waits at most L / ``ageing`` seconds for others that came later.
    """

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """The same requests; of two alike the one that came first."""
        return sorted(waiting, key=lambda r: r.num_tokens_to_do - self._ageing * (now - r.arrival))


def shortest_prompt_first(ageing: float) -> Scheduler:
    """Whole prompts, the shortest first; where blocks run out the last arrived yields."""
    return ComposedScheduler(ShortestFirst(ageing), LastArrived(), WholePrompts())
