"""A worker's memory of its requests, one slot each: device rows at fixed addresses, and the host's half.

Contract: a slot is cleared on release, so nothing of a request reaches the next one in its slot. The last slot is the
padding row: no tokens, null block. After drafts were rejected the true lengths exist on the device only; the host keeps
upper bounds until a step is read.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from mini_infer.plan import Grant, NewRow


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

    def enter(self, new: NewRow) -> None:
        """A request enters its slot."""
        self.num_computed[new.slot] = new.num_computed_tokens
        self.rows[new.slot] = HostRow(
            token_ids=np.asarray(new.token_ids, dtype=np.int64),
            num_prompt_tokens=new.num_prompt_tokens,
            params_prompt_logprobs=new.params.prompt_logprobs,
            params_logprobs=new.params.logprobs,
            num_run=new.num_computed_tokens,
            max_computed=new.num_computed_tokens,
        )
        self._extend(new.slot, new.block_ids)

    def grow(self, grant: Grant) -> None:
        """A row gets the blocks that its grant brings."""
        if grant.new_block_ids:
            self._extend(grant.slot, grant.new_block_ids)

    def clear(self, slot: int) -> None:
        """A slot is released; clearing a free slot changes nothing."""
        if self.rows.pop(slot, None) is not None:
            self.last_token[slot] = 0
            self.num_computed[slot] = 0
            self.block_table[slot].zero_()

    def _extend(self, slot: int, block_ids: list[int]) -> None:
        row = self.rows[slot]
        if block_ids:
            blocks = torch.tensor(block_ids, dtype=torch.int32, device=self.block_table.device)
            self.block_table[slot, row.num_blocks : row.num_blocks + len(block_ids)] = blocks
            row.num_blocks += len(block_ids)
