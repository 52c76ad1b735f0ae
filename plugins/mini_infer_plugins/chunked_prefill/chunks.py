"""ChunksBesideDecodes: how much of a prompt runs in a step, so that nobody who is decoding waits long.

Contract: a decoding request gets its token in every step; what is left of the step's tokens goes to prompts in the
scheduler's order. While fewer than four decode for each that has yet to run its prompt, as when a large batch has just
been handed in, a step takes as much as the engine allows: small steps would serve few and keep many waiting.
"""

from mini_infer.interfaces import ChunkPolicy, RequestView, SchedulerView


class ChunksBesideDecodes(ChunkPolicy):
    """See the module.

    Args:
        max_tokens: that a step runs, decodes and prompts together, while most requests decode; four times as many as
            decode, where that is more.
        equal_history: tokens of history that make a prompt's token cost twice as much as one that has none.
    """

    name = "chunked-prefill"
    _DECODES_A_PROMPT = 4
    _TILE = 128  # tokens that matrix products take at a time: a step of fewer takes no less time

    def __init__(self, max_tokens: int, equal_history: int = 49_152) -> None:
        self._max_tokens = max_tokens
        self._equal_history = equal_history
        self._asked: SchedulerView | None = None
        self._budget = 0  # of the step that is asked about

    def chunk(self, request: RequestView, budget_left: int, view: SchedulerView) -> int:
        """All that is to do, as far as the step has room; of a token with much history, which costs more, fewer fit."""
        if view is not self._asked:
            self._asked, self._budget = view, self._budget_of(view)
        room = self._budget - (view.token_budget - budget_left)
        if room > 1 and self._budget < view.token_budget:
            history = request.num_tokens - request.num_tokens_to_do
            affordable = self._budget * self._equal_history / (self._equal_history + history)
            room = max(1, room - self._TILE * round((self._budget - affordable) / self._TILE))
        return max(0, min(request.num_tokens_to_do, budget_left, room))

    def _budget_of(self, view: SchedulerView) -> int:
        decoding = sum(request.num_tokens_to_do == 1 and request.num_output_tokens > 0 for request in view.running)
        prompts = len(view.running) - decoding + len(view.waiting)
        if decoding < self._DECODES_A_PROMPT * prompts:
            return view.token_budget
        return max(self._max_tokens, self._DECODES_A_PROMPT * decoding)
