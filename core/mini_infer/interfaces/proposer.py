"""Proposer: drafts for speculation. Acceptance is the core's, so a bad proposer can only be slow."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mini_infer.interfaces.scheduler import RequestView


class DraftRequest(Protocol):
    """A decoding request whose tokens have all been read."""

    @property
    def view(self) -> "RequestView":
        """The request as policies see it."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and output; not to be changed."""


class Proposer(ABC):
    """Drafts on the host. A step with drafts is not overlapped: its proposer needs the last step's tokens."""

    max_drafts: int
    """Most drafts a request and step."""

    def width(self, num_decoding: int) -> int:
        """Most drafts a request wanted in the coming step, given so many decoding requests; 0 keeps it overlapped.

        Asked once a step that has decoding requests, those counted whose last step has not been read yet.
        """
        return self.max_drafts

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        """For each request up to ``max_drafts`` token ids that may follow its last token; empty for none.

        Ids outside the vocabulary are a ``PluginError``.
        """

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """How a request's drafts fared. Nothing by default."""
        return
