"""FairShare: the tenant that has had least service goes first, by the virtual token counters of VTC.

Sheng et al., Fairness in Serving Large Language Models, OSDI 2024 (arXiv 2401.00588), algorithm 2.

Contract: a counter grows by ``input_weight`` for each prompt token when a request is first admitted, and by
``output_weight`` for each output token. A tenant that had no request and comes back is lifted to the lowest counter
of those that have some, for idleness is no credit. So while two tenants have requests waiting, their service differs
by a bound that depends on the longest prompt and the batch alone, and each one's turn comes.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from mini_infer.interfaces import OrderPolicy, RequestView, SchedulerView


@dataclass(slots=True)
class _Account:
    """What one request has been charged for."""

    num_output_tokens: int
    seen: int  # the step in which it was last on offer


class FairShare(OrderPolicy):
    """See the module.

    Args:
        input_weight: of a prompt token.
        output_weight: of an output token.
    """

    name = "fair-share"
    _FORGET = 64  # steps after which a request that is not on offer has surely ended

    def __init__(self, input_weight: float, output_weight: float) -> None:
        self._input_weight = input_weight
        self._output_weight = output_weight
        self._counters: dict[str | None, float] = {}
        self._accounts: dict[str, _Account] = {}
        self._active: set[str | None] = set()
        self._last_left: float = 0.0  # the counter of the tenant that was last to have requests
        self._step = 0

    def begin_step(self, view: SchedulerView) -> None:
        """Lift tenants that came back, and charge what has been served since the last step."""
        self._step += 1
        self._lift({request.tenant for request in (*view.running, *view.waiting)})
        for request in view.running:
            self._charge(request)
        for request in view.waiting:
            if account := self._accounts.get(request.request_id):
                account.seen = self._step
        if self._step % self._FORGET == 0:
            since = self._step - self._FORGET
            self._accounts = {name: each for name, each in self._accounts.items() if each.seen > since}

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """Each next one from the tenant whose counter is lowest, those before it counted; within one as they came."""
        queues: dict[str | None, deque[RequestView]] = {}
        for request in waiting:
            queues.setdefault(request.tenant, deque()).append(request)
        turns = [(self._counters.get(tenant, 0.0), number, tenant) for number, tenant in enumerate(queues)]
        heapify(turns)
        ordered: list[RequestView] = []
        while turns:
            counter, number, tenant = heappop(turns)
            request = queues[tenant].popleft()
            ordered.append(request)
            if queues[tenant]:
                cost = 0.0 if request.request_id in self._accounts else self._price(request)
                heappush(turns, (counter + cost, number, tenant))
        return ordered

    def _lift(self, tenants: set[str | None]) -> None:
        gone = self._active - tenants
        if gone:
            self._last_left = max(self._counters[tenant] for tenant in gone)
        stayed = self._active & tenants
        floor = min((self._counters[tenant] for tenant in stayed), default=self._last_left)
        for tenant in tenants - stayed:
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), floor)
        self._active = tenants

    def _charge(self, request: RequestView) -> None:
        account = self._accounts.get(request.request_id)
        if account is None:
            account = self._accounts[request.request_id] = _Account(0, self._step)
            self._counters[request.tenant] += self._price(request)
        account.seen = self._step
        new = request.num_output_tokens - account.num_output_tokens
        if new > 0:
            account.num_output_tokens = request.num_output_tokens
            self._counters[request.tenant] += self._output_weight * new

    def _price(self, request: RequestView) -> float:
        return self._input_weight * request.num_prompt_tokens
