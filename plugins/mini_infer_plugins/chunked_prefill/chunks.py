"""ChunksBesideDecodes: how much of a prompt runs in a step, so that nobody who is decoding waits long.

Contract: a decoding request gets its token in every step; what is left of the step's tokens goes to prompts in the
scheduler's order. While fewer than four decode for each that has yet to run its prompt, as when a large batch has just
been handed in, a step takes as much as the engine allows: small steps would serve few and keep many waiting.

With a target for the time between tokens, chunks are also cut so that a step that has decodes is predicted to end
within it. With a share for long prompts, short ones behind them go ahead once a step's share is used.
"""

from mini_infer.interfaces import ChunkPolicy, RequestView, SchedulerView
from mini_infer.reference.step_cost import StepCost


class ChunksBesideDecodes(ChunkPolicy):
    """See the module.

    Args:
        max_tokens: that a step runs, decodes and prompts together, while most requests decode; four times as many as
            decode, where that is more.
        equal_history: tokens of history that make a prompt's token cost twice as much as one that has none.
        itl_target: seconds that a step with decodes may take; None: no limit but ``max_tokens``.
        long_prompt: tokens of a prompt from which on it is long.
        max_long_tokens: of long prompts together in a step while others wait or run prompts; None: no limit.
    """

    name = "chunked-prefill"
    _DECODES_A_PROMPT = 4
    _TILE = 128  # tokens that matrix products take at a time: a step of fewer takes no less time

    def __init__(
        self,
        max_tokens: int,
        equal_history: int = 49_152,
        itl_target: float | None = None,
        long_prompt: int = 2048,
        max_long_tokens: int | None = None,
    ) -> None:
        self._max_tokens = max_tokens
        self._equal_history = equal_history
        self._itl_target = itl_target
        self._long_prompt = long_prompt
        self._max_long_tokens = max_long_tokens
        self.lets_pass = max_long_tokens is not None
        self._cost = StepCost()
        self._budget = 0  # of this step
        self._num_decoding = 0
        self._long_left: int | None = None  # of this step's share for long prompts

    def begin_step(self, view: SchedulerView) -> None:
        """Size the step."""
        if self._itl_target is not None:
            self._cost.begin_step(view)
        self._num_decoding = sum(r.num_tokens_to_do == 1 and r.num_output_tokens > 0 for r in view.running)
        self._budget = self._budget_of(view)
        prompts = [r for r in (*view.running, *view.waiting) if r.num_tokens_to_do > 1]
        any_short = not all(map(self._is_long, prompts))
        self._long_left = self._max_long_tokens if any_short else None

    def chunk(self, request: RequestView, budget_left: int, view: SchedulerView) -> int:
        """All that is to do, as far as the step has room; of a token with much history, which costs more, fewer fit."""
        room = self._budget - (view.token_budget - budget_left)
        if room > 1 and self._budget < view.token_budget:
            history = request.num_tokens - request.num_tokens_to_do
            affordable = self._budget * self._equal_history / (self._equal_history + history)
            room = max(1, room - self._TILE * round((self._budget - affordable) / self._TILE))
        num_tokens = max(0, min(request.num_tokens_to_do, budget_left, room, self._in_time(request)))
        if self._long_left is not None and self._is_long(request):
            num_tokens = min(num_tokens, self._long_left)
            self._long_left -= num_tokens
        if self._itl_target is not None:
            self._cost.add(request, num_tokens)
        return num_tokens

    def _budget_of(self, view: SchedulerView) -> int:
        prompts = len(view.running) - self._num_decoding + len(view.waiting)
        if self._num_decoding < self._DECODES_A_PROMPT * prompts:
            return view.token_budget
        return max(self._max_tokens, self._DECODES_A_PROMPT * self._num_decoding)

    def _in_time(self, request: RequestView) -> int:
        """Tokens with which the step is predicted to keep the target; at least one, so that a prompt gets to its end.

        One whole prompt's tokens where nobody decodes, no target is set or nothing is known yet.
        """
        if self._itl_target is None or not self._num_decoding:
            return request.num_tokens_to_do
        within = self._cost.tokens_within(self._itl_target, request)
        return request.num_tokens_to_do if within is None else max(1, within)

    def _is_long(self, request: RequestView) -> bool:
        return request.num_prompt_tokens >= self._long_prompt
