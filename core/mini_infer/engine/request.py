"""One choice of one request, as the engine's host side knows it. There are no phases: it has tokens to catch up with.

::

    token_ids   [ prompt ............... | output read so far ]  (tokens in flight: not read yet)
                 └─ num_computed_tokens ─┘└─ launched in flight ─┘└─ num_tokens_to_do ─┘
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from mini_infer.messages import EngineRequest, FinishReason
from mini_infer.plan import Grant, TokenLogprobs


class Status(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class InFlight:
    """A grant that was launched and not yet read."""

    num_tokens: int
    num_drafts: int
    samples: bool
    stale: bool = False  # preempted since: its tokens count, its KV does not


@dataclass(slots=True, eq=False)
class Request:
    """The host's state of a request. Only the core changes it; policies see ``view``."""

    spec: EngineRequest
    arrival: float
    deadline: float | None
    token_ids: list[int]  # prompt + output read
    status: Status = Status.WAITING
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # of full blocks, as far as computed (prefix caching only)
    block_tokens: list[bytes] = field(default_factory=list)  # their tokens, packed
    num_keyed_blocks: int = 0  # leading blocks whose keys are in the index
    awaited_copies: dict[int, int] = field(default_factory=dict)  # block index -> the copy that it waited for
    num_computed_tokens: int = 0  # KV known to be right, steps in flight not counted
    in_flight: deque[InFlight] = field(default_factory=deque)
    num_pending_tokens: int = 0  # that steps in flight draw for certain (accepted drafts come on top)
    num_flying_tokens: int = 0  # that steps in flight run, stale ones left out
    num_flying_drafts: int = 0  # that steps in flight verify, stale ones left out
    draft_token_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the first admission's prefix hit
    num_prompt_logprobs: int = 0  # computed since it was last admitted
    num_prompt_logprobs_given: int = 0  # handed out
    suspect: bool = False  # was in a step that raised: runs alone once
    num_failures: int = 0
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = field(init=False)
    max_tokens: int = field(init=False)  # most output tokens
    view: "View" = field(init=False)

    def __post_init__(self) -> None:
        longest = self.spec.params.max_tokens
        assert longest is not None  # the front end has clamped it
        self.num_prompt_tokens, self.max_tokens = len(self.spec.prompt_token_ids), longest
        self.view = View(self)

    @property
    def request_id(self) -> str:
        """Unique among live requests."""
        return self.spec.request_id

    @property
    def num_tokens(self) -> int:
        """Prompt and output, tokens in flight counted."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_launched_tokens(self) -> int:
        """Tokens whose KV is right once the steps in flight are read, rejected drafts assumed."""
        return self.num_computed_tokens + self.num_flying_tokens

    @property
    def max_launched_tokens(self) -> int:
        """The same, with every draft accepted: blocks are reserved for this."""
        return self.num_computed_tokens + self.num_flying_tokens + self.num_flying_drafts

    @property
    def num_tokens_to_do(self) -> int:
        """Tokens whose KV is missing; 0 when the steps in flight may already end it."""
        num_tokens = len(self.token_ids) + self.num_pending_tokens
        if num_tokens + self.num_flying_drafts - self.num_prompt_tokens >= self.max_tokens > 0:
            return 0
        return num_tokens - self.num_computed_tokens - self.num_flying_tokens

    def launch(self, grant: Grant) -> None:
        """A step with this grant is on its way."""
        num_drafts = len(grant.draft_token_ids)
        self.in_flight.append(InFlight(grant.num_tokens, num_drafts, grant.samples))
        self.num_pending_tokens += grant.samples
        self.num_flying_tokens += grant.num_tokens
        self.num_flying_drafts += num_drafts
        self.draft_token_ids = []

    def land(self) -> InFlight:
        """The oldest step in flight is being read."""
        launched = self.in_flight.popleft()
        self.num_pending_tokens -= launched.samples
        if not launched.stale:
            self.num_flying_tokens -= launched.num_tokens
            self.num_flying_drafts -= launched.num_drafts
        return launched

    @property
    def output_token_ids(self) -> list[int]:
        """Output read so far."""
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token_ids: list[int]) -> tuple[list[int], FinishReason | None, int | None]:
        """Add drawn tokens up to the one that ends the request.

        Returns:
            (those added, why the request ends or None, the token that ended it or None).
        """
        params = self.spec.params
        if self.max_tokens == 0 and self.num_computed_tokens >= self.num_prompt_tokens:
            return [], "length", None
        for index, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            num_output = len(self.token_ids) - self.num_prompt_tokens
            is_eos = token_id in self.spec.eos_token_ids and not params.ignore_eos
            if num_output >= params.min_tokens and (is_eos or token_id in params.stop_token_ids):
                return token_ids[: index + 1], "stop", token_id
            if num_output >= self.max_tokens:
                return token_ids[: index + 1], "length", None
        return token_ids, None, None

    def new_prompt_logprobs(self, computed: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Those of the prompt's log-probabilities just computed that were not handed out before a preemption."""
        known = self.num_prompt_logprobs_given - self.num_prompt_logprobs
        self.num_prompt_logprobs += len(computed)
        self.num_prompt_logprobs_given = max(self.num_prompt_logprobs_given, self.num_prompt_logprobs)
        return computed[max(known, 0) :]

    def forget_flights(self) -> None:
        """The steps in flight were dropped unread."""
        while self.in_flight:
            self.land()

    def start_over(self) -> None:
        """Forget all KV, computed or in flight; tokens, in flight ones too, stay."""
        for launched in self.in_flight:
            launched.stale = True
        self.num_flying_tokens = self.num_flying_drafts = 0
        self.status = Status.WAITING
        self.num_computed_tokens = 0
        self.draft_token_ids = []
        self.num_preemptions += 1


class View:
    """``interfaces.RequestView`` over a request: reads only."""

    __slots__ = ("_request", "num_hit_tokens", "num_tokens_to_do")

    def __init__(self, request: Request) -> None:
        self._request = request
        self.num_hit_tokens = 0
        self.num_tokens_to_do = 0  # as of the last ``offer``

    def offer(self, num_hit_tokens: int = 0) -> int:
        """Look at the request once a step; its tokens to do, a hit taken off."""
        self.num_hit_tokens = num_hit_tokens
        self.num_tokens_to_do = self._request.num_tokens_to_do - num_hit_tokens
        return self.num_tokens_to_do

    @property
    def request_id(self) -> str:
        return self._request.spec.request_id

    @property
    def arrival(self) -> float:
        return self._request.arrival

    @property
    def running(self) -> bool:
        return self._request.status is Status.RUNNING

    @property
    def num_tokens(self) -> int:
        return self._request.num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return self._request.num_tokens - self._request.num_prompt_tokens

    @property
    def max_tokens(self) -> int:
        return self._request.max_tokens

    @property
    def num_blocks(self) -> int:
        return len(self._request.block_ids)

    @property
    def num_drafts_offered(self) -> int:
        return len(self._request.draft_token_ids)

    @property
    def num_preemptions(self) -> int:
        return self._request.num_preemptions

    @property
    def priority(self) -> int:
        return self._request.spec.priority

    @property
    def deadline(self) -> float | None:
        return self._request.deadline

    @property
    def tenant(self) -> str | None:
        return self._request.spec.tenant

    def __repr__(self) -> str:
        return f"<request {self.request_id}: {self.num_tokens} tokens, {self.num_tokens_to_do} to do>"
