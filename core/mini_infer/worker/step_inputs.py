"""From a plan to a packed batch: token ids, positions, slots, lengths, in buffers with fixed addresses.

Contract: everything that depends on how many drafts were accepted (positions, lengths, slots) is computed on the device
from ``BatchState``; the host adds only what a plan says. Rows of padding run on the null block.
"""

from dataclasses import dataclass

import numpy as np
import torch

from mini_infer.errors import PluginError
from mini_infer.forward_batch import ForwardBatch, StepShape
from mini_infer.interfaces.attention import BatchLimits
from mini_infer.interfaces.sampler import SamplingRows
from mini_infer.interfaces.step_runner import StepRunner
from mini_infer.plan import Grant, LateInputs, StepPlan
from mini_infer.worker.batch_state import BatchState, HostRow


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Where one grant lies in the packed batch."""

    grant: Grant
    start: int  # its first token's index
    num_tokens: int
    num_drafts: int
    row: HostRow  # as it was when this step was laid out: the slot may have another by the time it is read
    first_position: int  # of its first token; exact only while the row runs its prompt


class StepInputs:
    """Makes each step's ``ForwardBatch`` in place.

    Args:
        state: the worker's slots.
        limits: sizes of the buffers.
        device: torch device string.
    """

    def __init__(self, state: BatchState, limits: BatchLimits, device: str) -> None:
        self._state = state
        self._block_size = limits.block_size
        self._limits = limits
        self._device = torch.device(device)

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._input_ids = zeros(limits.max_num_tokens, dtype=torch.int64)
        self._positions = zeros(limits.max_num_tokens, dtype=torch.int64)
        self._slot_mapping = zeros(limits.max_num_tokens, dtype=torch.int64)
        self._cu_seqlens_q = zeros(limits.max_num_rows + 1, dtype=torch.int32)
        self._seq_lens = zeros(limits.max_num_rows, dtype=torch.int32)
        self._block_table = zeros(limits.max_num_rows, limits.max_blocks_per_row, dtype=torch.int32)

    def prepare(self, plan: StepPlan, runner: StepRunner) -> tuple[ForwardBatch, list[RowSpan]]:
        """The step's batch, padded as ``runner`` wishes, and where each grant lies in it."""
        spans, input_ids, last_token_at, last_token_slots = self._lay_out(plan)
        query_lens = [span.num_tokens + span.num_drafts for span in spans]
        slots = [span.grant.slot for span in spans]
        seq_lens_host = [self._state.rows[s].max_computed + n for s, n in zip(slots, query_lens, strict=True)]
        decodes = spans[0].num_tokens == 1 and spans[0].grant.samples
        shape, padding = self._pad(query_lens, query_lens[0] if decodes else 0, runner)
        if padding:
            query_lens += padding
            slots += [self._state.padding_slot] * len(padding)
            seq_lens_host += padding
            input_ids = np.concatenate([input_ids, np.zeros(sum(padding), dtype=np.int64)])
        self._fill(shape, slots, query_lens, input_ids, last_token_at, last_token_slots)
        batch = ForwardBatch(
            shape=shape,
            input_ids=self._input_ids[: shape.num_tokens],
            positions=self._positions[: shape.num_tokens],
            slot_mapping=self._slot_mapping[: shape.num_tokens],
            cu_seqlens_q=self._cu_seqlens_q[: shape.num_rows + 1],
            seq_lens=self._seq_lens[: shape.num_rows],
            block_table=self._block_table[: shape.num_rows],
            query_lens_host=query_lens,
            seq_lens_host=seq_lens_host,
        )
        return batch, spans

    def _lay_out(self, plan: StepPlan) -> tuple[list[RowSpan], np.ndarray, list[int], list[int]]:
        spans: list[RowSpan] = []
        pieces: list[np.ndarray] = []
        last_token_at: list[int] = []
        last_token_slots: list[int] = []
        start = 0
        for grant in plan.grants:
            row = self._state.rows[grant.slot]
            known = row.token_ids[row.num_run : row.num_run + grant.num_tokens]
            pieces.append(known)
            if len(known) < grant.num_tokens:  # the row has caught up: its next token is on the device only
                last_token_at.append(start + len(known))
                last_token_slots.append(grant.slot)
                pieces.append(np.zeros(1, dtype=np.int64))
            if grant.draft_token_ids:
                pieces.append(np.asarray(grant.draft_token_ids, dtype=np.int64))
            num_drafts = len(grant.draft_token_ids)
            spans.append(RowSpan(grant, start, grant.num_tokens, num_drafts, row, row.num_run))
            row.num_run += len(known)
            start += grant.num_tokens + num_drafts
        return spans, np.concatenate(pieces), last_token_at, last_token_slots

    def _pad(self, query_lens: list[int], decode_query_len: int, runner: StepRunner) -> tuple[StepShape, list[int]]:
        """The padded shape that the runner chose, and the tokens of each padding row."""
        exact = StepShape.of(query_lens, decode_query_len)
        chosen = runner.shape(exact)
        more_rows, more_tokens = chosen.num_rows - exact.num_rows, chosen.num_tokens - exact.num_tokens
        each, left = divmod(more_tokens, more_rows) if more_rows > 0 else (0, more_tokens)
        padding = [each + 1] * left + [each] * (more_rows - left) if more_rows > 0 else []
        fits = chosen.num_rows <= self._limits.max_num_rows and chosen.num_tokens <= self._limits.max_num_tokens
        longest = (self._limits.max_blocks_per_row - 1) * self._block_size + 1  # what any row may reach
        if sum(padding) != more_tokens or not all(1 <= n <= longest for n in padding) or more_rows < 0 or not fits:
            raise PluginError(f"step runner {type(runner).__name__} chose shape {chosen} for {exact}")
        return StepShape.of([*query_lens, *padding], decode_query_len), padding

    def _fill(
        self,
        shape: StepShape,
        slots: list[int],
        query_lens: list[int],
        input_ids: np.ndarray,
        last_token_at: list[int],
        last_token_slots: list[int],
    ) -> None:
        lens = np.asarray(query_lens, dtype=np.int64)
        ends = np.cumsum(lens)
        row_of_token = np.repeat(np.arange(len(lens)), lens)
        offsets = np.arange(shape.num_tokens) - (ends - lens)[row_of_token]
        host = np.concatenate([np.asarray(slots, dtype=np.int64), lens, row_of_token, offsets, input_ids])
        on_device = self._upload(host)
        num_rows, num_tokens = shape.num_rows, shape.num_tokens
        sizes = [num_rows, num_rows, num_tokens, num_tokens, num_tokens]
        slot, query_len, row, offset, ids = torch.split(on_device, sizes)

        self._input_ids[:num_tokens].copy_(ids)
        if last_token_at:
            where = self._upload(np.asarray([last_token_at, last_token_slots], dtype=np.int64))
            self._input_ids.index_copy_(0, where[0], self._state.last_token.index_select(0, where[1]))
        computed = self._state.num_computed.index_select(0, slot)
        positions = self._positions[:num_tokens]
        torch.add(computed.index_select(0, row), offset, out=positions)
        self._cu_seqlens_q[1 : num_rows + 1].copy_(query_len.cumsum(0))
        self._seq_lens[:num_rows].copy_(computed + query_len)
        table = self._block_table[:num_rows]
        torch.index_select(self._state.block_table, 0, slot, out=table)
        block = torch.div(positions, self._block_size, rounding_mode="floor")
        block_id = table.view(-1).index_select(0, row * table.shape[1] + block).to(torch.int64)
        self._slot_mapping[:num_tokens].copy_(block_id * self._block_size + positions % self._block_size)

    def sampling_rows(
        self, spans: list[RowSpan], late: LateInputs, positions: torch.Tensor
    ) -> tuple[torch.Tensor, SamplingRows, list[int]]:
        """Which positions draw.

        Returns:
            ([num_rows] token index of each drawing position, the rows, drafts verified for each drawing span).
        """
        token_index: list[int] = []
        slots: list[int] = []
        draft_index: list[int] = []
        num_drafts: list[int] = []
        before: list[list[int]] = []
        for span in spans:
            if not span.grant.samples:
                continue
            kept = late.kept_drafts.get(span.grant.slot, span.num_drafts)
            num_drafts.append(kept)
            first = span.start + span.num_tokens - 1
            for j in range(kept + 1):
                token_index.append(first + j)
                slots.append(span.grant.slot)
                draft_index.append(j)
                before.append(span.grant.draft_token_ids[:j])
        width = max(draft_index, default=0)
        drafts_before = None
        if width:
            drafts_before = self._upload(np.array([d + [-1] * (width - len(d)) for d in before], dtype=np.int64))
        where = self._upload(np.asarray([token_index, slots], dtype=np.int64))
        rows = SamplingRows(
            slots=where[1],
            positions=positions.index_select(0, where[0]) + 1,
            drafts_before=drafts_before,
            slots_host=slots,
            draft_index_host=draft_index,
        )
        return where[0], rows, num_drafts

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        if self._device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
