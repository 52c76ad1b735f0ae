"""The order of waiting requests: fewest prompt tokens left to compute, less what each has waited."""

from collections.abc import Sequence

from mini_infer.interfaces import OrderPolicy, RequestView


class ShortestFirst(OrderPolicy):
    """Shortest first, with ageing.

    Args:
        ageing: tokens a second. A prompt of L tokens waits at most L / ``ageing`` seconds for others that came later.
    """

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """The same requests; of two alike the one that came first."""
        return sorted(waiting, key=lambda r: r.num_tokens_to_do - self._ageing * (now - r.arrival))
