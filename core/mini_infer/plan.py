"""The messages between scheduling and running. Plans are differences: workers keep every row's state.

``StepPlan`` is the only thing that passes from the scheduler's side to a worker's, ``StepOutput`` the only thing that
comes back, ``LateInputs`` what had to wait for the last step's tokens. All are frozen and serialisable with msgspec,
so an executor in this process, in another or on another machine takes the same plan. No pickle on any wire.

A *slot* is a request's place in the workers' state, from its admission to the batch until it is released; the host
chooses it, so that all workers agree. Slot numbers are reused; a step's answers therefore come in its plan's order.
"""

import msgspec

from mini_infer.sampling_params import SamplingParams

DEVICE_TIER = "device"


class NewRow(msgspec.Struct, frozen=True):
    """A request that enters the workers' state, whole (first time, or again after preemption)."""

    slot: int
    token_ids: list[int]  # prompt, and the output so far if it was preempted
    num_prompt_tokens: int
    num_computed_tokens: int  # > 0 after a prefix hit
    block_ids: list[int]  # blocks already holding those
    params: SamplingParams
    seed: int  # unsigned 64 bits
    choice: int


class Grant(msgspec.Struct, frozen=True, gc=False):  # hundreds a step, none of which refers to itself
    """One row of a step: so many tokens of one request, and the drafts behind them.

    The tokens are the next ``num_tokens`` after those computed. The last known token of a decoding row may not have
    been read by the host yet: it is then the one that the device keeps as the row's last token.
    """

    slot: int
    num_tokens: int
    samples: bool  # the row's last position draws a token
    new_block_ids: list[int] = []
    draft_token_ids: list[int] = []


class BlockRef(msgspec.Struct, frozen=True):
    """A block of one tier."""

    tier: str
    block_id: int


class Copy(msgspec.Struct, frozen=True):
    """Move a block's content, all layers, to another tier once step ``after_step`` has run."""

    copy_id: int
    source: BlockRef
    target: BlockRef
    after_step: int


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """One step's work. Uniform rows (decode, verify) first, then prompts."""

    step_id: int
    grants: list[Grant]
    new: list[NewRow] = []
    released: list[int] = []  # slots, released before ``new`` enter
    copies: list[Copy] = []

    @property
    def num_tokens(self) -> int:
        """Tokens run in this step, drafts counted."""
        return sum(g.num_tokens + len(g.draft_token_ids) for g in self.grants)


class LateInputs(msgspec.Struct, frozen=True):
    """What needed the last step's tokens. Keys are slots.

    ``masks`` holds one bit mask for each position that draws (the sampled one, then one a draft): little-endian bits,
    bit i of byte i // 8 allows token i; an empty mask allows all. ``kept_drafts`` cuts a row's drafts to that many.
    """

    masks: dict[int, list[bytes]] = {}
    kept_drafts: dict[int, int] = {}


class TokenLogprobs(msgspec.Struct, frozen=True):
    """A token's log-probability over the full logits width, before any masking, and the most likely tokens there."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top: list[tuple[int, float]] = []


class RowOutput(msgspec.Struct, frozen=True, gc=False):
    """What one grant gave."""

    token_ids: list[int]  # accepted drafts, then the token drawn after them; empty if the row did not sample
    ok: bool = True  # logits were finite
    logprobs: list[TokenLogprobs] = []  # one a token of ``token_ids``, when asked for
    prompt_logprobs: list[TokenLogprobs] = []  # for the prompt positions of this grant, when asked for


class StepOutput(msgspec.Struct, frozen=True, gc=False):
    """A step's answer: one row for each grant, in the plan's order."""

    step_id: int
    rows: list[RowOutput]
    copies_done: list[int] = []
    copies_failed: list[int] = []
