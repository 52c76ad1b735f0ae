"""A worker's memory of its requests, one slot each: device rows at fixed addresses, and the host's half.

Contract: a slot is cleared on release, so nothing of a request reaches the next one in its slot. The last slot is the
padding row: no tokens, null block. After drafts were rejected the true lengths exist on the device only; the host keeps
upper bounds until a step is read. A step's changes reach the device in a few operations, however many rows they touch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mini_infer.plan import Grant, NewRow
from mini_infer.sampling.state import to_device


@dataclass(slots=True)
class HostRow:
    """The host's half of a slot."""

    token_ids: np.ndarray  # [num_tokens] int64: those known when it entered
    num_prompt_tokens: int
    params_prompt_logprobs: int | None
    params_logprobs: int | None
    num_run: int = 0  # tokens of ``token_ids`` that were run
    max_computed: int = 0  # upper bound of the device's ``num_computed``
    num_blocks: int = 0


@dataclass(slots=True)
class BatchState:
    """All slots of a worker.

    Attributes:
        last_token: [num_slots] int64, the newest drawn token, which is the next step's input.
        num_computed: [num_slots] int64, tokens whose KV is in the cache and right.
        block_table: [num_slots, max_blocks_per_row] int32, 0 where unused.
        rows: the host's half, by slot.
    """

    last_token: torch.Tensor
    num_computed: torch.Tensor
    block_table: torch.Tensor
    rows: dict[int, HostRow] = field(default_factory=dict)

    @classmethod
    def make(cls, max_num_seqs: int, max_blocks_per_row: int, device: str) -> "BatchState":
        """Empty state with ``max_num_seqs`` slots and the padding row."""
        num_slots = max_num_seqs + 1
        return cls(
            last_token=torch.zeros(num_slots, dtype=torch.int64, device=device),
            num_computed=torch.zeros(num_slots, dtype=torch.int64, device=device),
            block_table=torch.zeros((num_slots, max_blocks_per_row), dtype=torch.int32, device=device),
        )

    @property
    def padding_slot(self) -> int:
        """The slot that padding rows use."""
        return self.last_token.shape[0] - 1

    def clear(self, slots: Sequence[int]) -> None:
        """Slots are released; clearing a free slot changes nothing."""
        used = [slot for slot in slots if self.rows.pop(slot, None) is not None]
        if used:
            index = to_device(used, torch.int64, self.last_token.device)
            self.last_token.index_fill_(0, index, 0)
            self.num_computed.index_fill_(0, index, 0)
            self.block_table.index_fill_(0, index, 0)

    def enter(self, new: Sequence[NewRow]) -> None:
        """Requests enter their slots; their blocks come with ``extend``."""
        for row in new:
            self.rows[row.slot] = HostRow(
                token_ids=np.asarray(row.token_ids, dtype=np.int64),
                num_prompt_tokens=row.num_prompt_tokens,
                params_prompt_logprobs=row.params.prompt_logprobs,
                params_logprobs=row.params.logprobs,
                num_run=row.num_computed_tokens,
                max_computed=row.num_computed_tokens,
            )
        if new:
            values = to_device(
                [*(row.slot for row in new), *(row.num_computed_tokens for row in new)],
                torch.int64,
                self.num_computed.device,
            )
            self.num_computed.index_copy_(0, *values.chunk(2))

    def extend(self, new: Sequence[NewRow], grants: Sequence[Grant]) -> None:
        """Rows get the blocks that they bring with them, and those that their grants bring."""
        cells: list[int] = []
        blocks: list[int] = []
        for slot, block_ids in (
            *((row.slot, row.block_ids) for row in new),
            *((grant.slot, grant.new_block_ids) for grant in grants if grant.new_block_ids),
        ):
            row = self.rows[slot]
            first = slot * self.block_table.shape[1] + row.num_blocks
            cells += range(first, first + len(block_ids))
            blocks += block_ids
            row.num_blocks += len(block_ids)
        if cells:
            values = to_device([*cells, *blocks], torch.int64, self.block_table.device)
            where, ids = values.chunk(2)
            self.block_table.view(-1).index_copy_(0, where, ids.to(torch.int32))
