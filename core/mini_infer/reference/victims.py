"""Victim policies that settings can name: whoever yields, the one that is furthest ahead never does.

Contract: each ranks requests so that progress never makes one a likelier victim. So of those that compete for blocks
the first in rank runs to its end, then the next: preemption goes round in no circle.
"""

from collections.abc import Sequence

from mini_infer.interfaces.scheduler import RequestView, VictimPolicy


class LongestRemaining(VictimPolicy):
    """Whoever may still write most yields: those nearly done go, and give their blocks back.

    One that has started over ``MOST_PREEMPTIONS`` times yields only to others like it, so that short requests that
    keep coming cannot keep a long one from its end.
    """

    name = "longest-remaining"
    MOST_PREEMPTIONS = 3

    def victim(self, asker: RequestView, candidates: Sequence[RequestView]) -> RequestView:
        """The one with most output to come, of equals the latest."""
        return max((asker, *candidates), key=self._rank)

    def _rank(self, request: RequestView) -> tuple[bool, int, float, str]:
        remaining = request.max_tokens - request.num_output_tokens
        return request.num_preemptions < self.MOST_PREEMPTIONS, remaining, request.arrival, request.request_id


class LeastProgress(VictimPolicy):
    """Whoever has computed least yields: the least work is lost."""

    name = "least-progress"

    def victim(self, asker: RequestView, candidates: Sequence[RequestView]) -> RequestView:
        """The one with fewest computed tokens, of equals the latest; an asker that waits has computed none."""
        return max((asker, *candidates), key=self._rank)

    def _rank(self, request: RequestView) -> tuple[int, float, str]:
        computed = request.num_tokens - request.num_tokens_to_do if request.running else 0
        return -computed, request.arrival, request.request_id
