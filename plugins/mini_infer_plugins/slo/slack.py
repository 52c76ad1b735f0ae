"""SlackOrder and SlackChunks: who has least time left goes first, and no step outlasts the tightest gap allowed.

Slack is the time to the moment at which a request's first token is due, less the time that its prompt takes.

Contract: a request whose target is lost lets those pass whose is not, which frees room for them, but after
``patience`` more seconds it goes before all: nobody starves. All times are predicted from what past steps took, by the
view's clock.
"""

from collections.abc import Sequence

from mini_infer.interfaces import ChunkPolicy, OrderPolicy, RequestView, SchedulerView
from mini_infer.reference.step_cost import StepCost
from mini_infer_plugins.slo.targets import Classes, Goodput


class PromptRate:
    """Seconds that a prompt's token takes, from how far prompts came between one step and the next."""

    _SHARE = 0.1  # of a new step in the average

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        self._now = 0.0
        self._to_do: dict[str, int] = {}

    def begin_step(self, view: SchedulerView) -> None:
        """Learn from the last step."""
        done = 0
        for request in view.running:
            before = self._to_do.get(request.request_id, 0)
            if before > 1:
                done += max(0, before - request.num_tokens_to_do)
        if done:
            new = (view.now - self._now) / done
            self.seconds_per_token += self._SHARE * (new - self.seconds_per_token)
        self._now = view.now
        self._to_do = {r.request_id: r.num_tokens_to_do for r in (*view.running, *view.waiting)}


class SlackOrder(OrderPolicy):
    """See the module.

    Args:
        classes: the targets.
        patience: seconds past its target after which a request goes before all others.
        goodput: told of each step.
    """

    name = "slo"

    def __init__(self, classes: Classes, patience: float, goodput: Goodput) -> None:
        self._classes = classes
        self._patience = patience
        self._goodput = goodput
        self._rate = PromptRate()

    def begin_step(self, view: SchedulerView) -> None:
        """Keep the accounts."""
        self._rate.begin_step(view)
        self._goodput.begin_step(view)

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """Out of patience as they came; then least slack first; then those whose target is lost."""
        return sorted(waiting, key=lambda request: self._rank(request, now))

    def _rank(self, request: RequestView, now: float) -> tuple[int, float, float]:
        due = self._classes.due(request)
        if now > due + self._patience:
            return 0, request.arrival, request.arrival
        slack = due - now - request.num_tokens_to_do * self._rate.seconds_per_token
        return (1 if slack >= 0 else 2), slack, request.arrival


class SlackChunks(ChunkPolicy):
    """Prompts take what is left of the tightest gap allowed between the tokens of those that decode.

    Args:
        classes: the targets.
        unknown: tokens a step beside decodes, while too little is known of what steps take.
    """

    name = "slo"

    def __init__(self, classes: Classes, unknown: int) -> None:
        self._classes = classes
        self._unknown = unknown
        self._cost = StepCost()
        self._tightest: float | None = None  # seconds; None: nobody decodes

    def begin_step(self, view: SchedulerView) -> None:
        """Learn from the last step, and see who decodes."""
        self._cost.begin_step(view)
        decoding = [r for r in view.running if r.num_tokens_to_do == 1 and r.num_output_tokens > 0]
        self._tightest = min((self._classes.of(request).itl for request in decoding), default=None)

    def chunk(self, request: RequestView, budget_left: int, view: SchedulerView) -> int:
        """As many as end in time; at least one, so that a prompt gets to its end."""
        num_tokens = min(request.num_tokens_to_do, budget_left)
        if self._tightest is not None and num_tokens:
            within = self._cost.tokens_within(self._tightest, request)
            room = self._unknown - (view.token_budget - budget_left) if within is None else within
            num_tokens = min(num_tokens, max(1, room))
        self._cost.add(request, num_tokens)
        return num_tokens
