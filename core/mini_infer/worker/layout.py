"""Layout: where each grant of a plan lies in the packed batch, on the host and on the device.

Contract: a layout says nothing that changes while the same rows decode (lengths and tokens are on the device), so it is
kept for as long as they do: such a step costs the host next to nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mini_infer.plan import Grant, StepPlan

if TYPE_CHECKING:
    from mini_infer.forward_batch import StepShape
    from mini_infer.worker.batch_state import BatchState, HostRow


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Where one grant lies in the packed batch."""

    grant: Grant
    start: int  # its first token's index
    num_tokens: int
    num_drafts: int
    row: "HostRow"  # as it was when this step was laid out: the slot may have another by the time it is read
    first_position: int  # of its first token; exact only while the row runs its prompt

    @property
    def wants_last_only(self) -> bool:
        """Whether nobody asks for an output of its tokens but the last."""
        return self.num_drafts == 0 and self.row.params_prompt_logprobs is None


@dataclass(frozen=True, slots=True)
class HostLayout:
    """The host's half, before padding.

    Attributes:
        spans: one a grant.
        input_ids: [num_tokens] int64; 0 where the device knows the token.
        last_token_at: indices of those.
        last_token_slots: whose last token each of them is.
        decodes: every row runs the token that it drew last, draws one, and has no drafts.
    """

    spans: list[RowSpan]
    input_ids: np.ndarray
    last_token_at: list[int]
    last_token_slots: list[int]
    decodes: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """A padded batch's layout.

    Attributes:
        shape: padded sizes.
        spans: one a grant; padding has none.
        decodes: as ``HostLayout.decodes``, and padding rows have one token too.
        slots: [num_rows] int64 on the device.
        query_lens: [num_rows] int64 on the device.
        row_of_token: [num_tokens] int64 on the device.
        offsets: [num_tokens] int64 on the device: each token's place in its row.
        query_lens_host: [num_rows].
        slots_host: [num_rows].
    """

    shape: "StepShape"
    spans: list[RowSpan]
    decodes: bool
    slots: torch.Tensor
    query_lens: torch.Tensor
    row_of_token: torch.Tensor
    offsets: torch.Tensor
    query_lens_host: list[int]
    slots_host: list[int]

    def serves(self, plan: StepPlan) -> bool:
        """Whether ``plan`` runs the same decoding rows again."""
        return (
            self.decodes
            and len(plan.grants) == len(self.spans)
            and not plan.new
            and not plan.released
            and all(
                grant.slot == slot and grant.num_tokens == 1 and grant.samples and not grant.draft_token_ids
                for grant, slot in zip(plan.grants, self.slots_host, strict=False)
            )
        )


def lay_out(plan: StepPlan, state: "BatchState") -> HostLayout:
    """One grant after another; the rows' ``num_run`` moves on."""
    spans: list[RowSpan] = []
    last_token_at: list[int] = []
    last_token_slots: list[int] = []
    num_tokens = sum(grant.num_tokens + len(grant.draft_token_ids) for grant in plan.grants)
    input_ids = np.zeros(num_tokens, dtype=np.int64)
    start = 0
    for grant in plan.grants:
        row, num_drafts = state.rows[grant.slot], len(grant.draft_token_ids)
        spans.append(RowSpan(grant, start, grant.num_tokens, num_drafts, row, row.num_run))
        num_known = min(len(row.token_ids) - row.num_run, grant.num_tokens)
        if num_known:
            input_ids[start : start + num_known] = row.token_ids[row.num_run : row.num_run + num_known]
            row.num_run += num_known
        if num_known < grant.num_tokens:  # the row has caught up: its next token is on the device only
            last_token_at.append(start + num_known)
            last_token_slots.append(grant.slot)
        start += grant.num_tokens
        if num_drafts:
            input_ids[start : start + num_drafts] = grant.draft_token_ids
            start += num_drafts
    decodes = len(last_token_at) == len(spans) == start and all(span.grant.samples for span in spans)
    return HostLayout(spans, input_ids, last_token_at, last_token_slots, decodes)


def query_lens_of(spans: Sequence[RowSpan]) -> list[int]:
    """[num_rows] tokens of each row, drafts counted."""
    return [span.num_tokens + span.num_drafts for span in spans]
