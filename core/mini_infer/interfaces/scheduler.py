"""Scheduler: who runs next and how much. It sees read-only views and returns wishes; the core does the rest."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class RequestView(Protocol):
    """What a policy may know of a request. Read-only; true until the call returns."""

    @property
    def request_id(self) -> str:
        """Unique among live requests."""

    @property
    def arrival(self) -> float:
        """Seconds on the clock of ``SchedulerView.now``."""

    @property
    def running(self) -> bool:
        """It holds blocks and a slot; otherwise it waits."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output, tokens in flight counted."""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt alone."""

    @property
    def num_output_tokens(self) -> int:
        """Output alone, tokens in flight counted."""

    @property
    def max_tokens(self) -> int:
        """Most output tokens it may reach."""

    @property
    def num_tokens_to_do(self) -> int:
        """Tokens whose KV is missing: 1 when it decodes. A prefix hit is already taken off."""

    @property
    def num_hit_tokens(self) -> int:
        """Waiting only: tokens that a prefix hit would spare now."""

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds."""

    @property
    def num_drafts_offered(self) -> int:
        """Draft tokens that could be verified behind its next token."""

    @property
    def num_preemptions(self) -> int:
        """How often it was made to start over."""

    @property
    def priority(self) -> int:
        """Lower is more urgent; 0 by default."""

    @property
    def deadline(self) -> float | None:
        """On the same clock as ``arrival``; None without one."""

    @property
    def tenant(self) -> str | None:
        """Whose request it is, for fair shares."""


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The engine as a policy sees it, once a step.

    Attributes:
        now: seconds; the only clock a policy may read, so that replay works.
        token_budget: most tokens, drafts counted, that this step may run.
        max_num_seqs: most requests that may run at once.
        block_size: tokens a block.
        num_free_blocks: blocks free now.
        num_evictable_blocks: cached blocks that nobody holds.
        num_running: requests that hold blocks, those with nothing to do now counted.
        running: requests that hold blocks and have tokens to do, in the order in which they entered.
        waiting: requests that do not, in order of arrival, preempted ones in their old place; loading ones left out.
        num_in_flight: steps launched and not yet read.
    """

    now: float
    token_budget: int
    max_num_seqs: int
    block_size: int
    num_free_blocks: int
    num_evictable_blocks: int
    num_running: int
    running: Sequence[RequestView]
    waiting: Sequence[RequestView]
    num_in_flight: int


@dataclass(frozen=True, slots=True)
class Wish:
    """So many tokens, and so many drafts behind them, to one request."""

    request: RequestView
    num_tokens: int
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Wishes in order of importance; ``wake_at`` when waiting work is held back on purpose (seconds, view's clock)."""

    wishes: Sequence[Wish]
    wake_at: float | None = None


class Scheduler(ABC):
    """Decides each step's grants and, when blocks run out, who yields.

    Errors: wishes over budget, double, to unknown or unoffered requests, of 0 tokens or more than are to do raise
    ``PluginError`` in the core; so does waiting work with nothing running, loading or copying, no wish and no
    ``wake_at``. Shortage of blocks is never an error.
    """

    @abstractmethod
    def schedule(self, view: SchedulerView) -> Schedule:
        """Called once a step. Must not keep the view."""

    @abstractmethod
    def victim(self, asker: RequestView, candidates: Sequence[RequestView]) -> RequestView:
        """Who gives its blocks back so that ``asker`` can run; ``asker`` itself means that it waits.

        Args:
            asker: the request whose wish does not fit.
            candidates: running requests that may be preempted now, ``asker`` (if it runs) among them.
        """


class SchedulingPolicy(ABC):  # noqa: B024 - what its three kinds decide is abstract in them
    """One of the three parts of a ``ComposedScheduler``.

    Attributes:
        name: what ``engine.order``, ``engine.victim`` or ``engine.chunks`` calls it; a plugin's must have one.
    """

    name: str = ""

    def begin_step(self, view: SchedulerView) -> None:  # noqa: B027 - most keep no accounts
        """Called once a step, before any other call, for policies that keep accounts. Must not keep the view."""


class OrderPolicy(SchedulingPolicy):
    """In which order waiting requests are considered.

    Attributes:
        ranks_running: the order holds for running requests too: one that waits may take blocks from one that runs.
    """

    ranks_running: bool = False

    @abstractmethod
    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """The same requests, most important first; with ``ranks_running`` asked about running ones too."""


class VictimPolicy(SchedulingPolicy):
    """Who yields when blocks run out."""

    @abstractmethod
    def victim(self, asker: RequestView, candidates: Sequence[RequestView]) -> RequestView:
        """As ``Scheduler.victim``."""


class ChunkPolicy(SchedulingPolicy):
    """How many of a prompt's tokens run in one step.

    Attributes:
        lets_pass: a waiting request that gets 0 lets those behind it go ahead; otherwise it ends the admissions.
    """

    lets_pass: bool = False

    @abstractmethod
    def chunk(self, request: RequestView, budget_left: int, view: SchedulerView) -> int:
        """From 0 (not in this step) to ``min(budget_left, request.num_tokens_to_do)``; once a step and request."""
