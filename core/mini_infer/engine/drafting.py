"""Drafts for the coming step, from a ``Proposer`` on the host.

Contract: only a decoding request whose tokens have all been read is drafted for, so a step with drafts is not
overlapped. A proposer says what may follow; what stands is the core's to decide (``mini_infer.sampling.acceptance``).
"""

from typing import TYPE_CHECKING

from mini_infer.engine.asking import Asking
from mini_infer.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.engine.request import Request
    from mini_infer.interfaces.proposer import Proposer
    from mini_infer.plan import Grant, RowOutput


class Drafting:
    """Asks the proposer, checks its drafts and leaves them with the requests; without a proposer it does nothing."""

    def __init__(self, proposer: "Proposer | None", vocab_size: int) -> None:
        self._proposer = proposer
        self._asking = Asking("proposer", proposer)
        self._vocab_size = vocab_size
        self._width = 0  # of the coming step

    def decide(self, running: "Sequence[Request]") -> bool:
        """Whether the coming step shall have drafts, so that the steps before it must be read first; asked once."""
        num_decoding = 0 if self._proposer is None else len(_decoding(running))
        self._width = 0
        if self._proposer is not None and num_decoding:
            with self._asking:
                self._width = self._proposer.width(num_decoding)
        return self._width > 0

    def propose(self, running: "Sequence[Request]") -> None:
        """Give each decoding request whose tokens have all been read its ``draft_token_ids``."""
        proposer = self._proposer
        requests = [] if proposer is None else [r for r in _decoding(running) if not r.in_flight]
        if proposer is None or not requests or self._width == 0:
            return
        with self._asking:
            drafts = proposer.propose(requests)
        name = type(proposer).__name__
        if len(drafts) != len(requests):
            raise PluginError(f"proposer {name} drafted for {len(drafts)} requests of {len(requests)}")
        for request, draft in zip(requests, drafts, strict=True):
            if not all(0 <= token_id < self._vocab_size for token_id in draft):
                raise PluginError(f"proposer {name} drafted a token outside the vocabulary of {self._vocab_size}")
            room = request.num_prompt_tokens + request.max_tokens - request.num_tokens - 1
            request.draft_token_ids = list(draft[: max(0, min(self._width, room))])

    def observe(self, request: "Request", grant: "Grant", row: "RowOutput") -> None:
        """Tell the proposer how a step's drafts fared."""
        if self._proposer is not None:
            with self._asking:
                self._proposer.observe(request.request_id, len(grant.draft_token_ids), len(row.token_ids) - 1)


def _decoding(running: "Sequence[Request]") -> "list[Request]":
    return [r for r in running if r.num_tokens_to_do == 1 and not r.suspect]
