"""From a plan to a packed batch: token ids, positions, slots, lengths, in buffers with fixed addresses.

Contract: everything that depends on how many drafts were accepted (positions, lengths, slots) is computed on the device
from ``BatchState``; the host adds only what a plan says, and nothing while the same rows decode. Rows of padding run on
the null block.
"""

from dataclasses import replace

import numpy as np
import torch

from mini_infer.errors import PluginError
from mini_infer.forward_batch import ForwardBatch, StepShape
from mini_infer.interfaces.attention import BatchLimits
from mini_infer.interfaces.sampler import SamplingRows
from mini_infer.interfaces.step_runner import StepRunner
from mini_infer.plan import LateInputs, StepPlan
from mini_infer.worker.batch_state import BatchState
from mini_infer.worker.layout import HostLayout, Layout, RowSpan, lay_out, query_lens_of


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
        self._layout: Layout | None = None  # of the last step
        self._batch: ForwardBatch | None = None

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._input_ids = zeros(limits.max_num_tokens, dtype=torch.int64)
        self._positions = zeros(limits.max_num_tokens, dtype=torch.int64)
        self._slot_mapping = zeros(limits.max_num_tokens, dtype=torch.int64)
        self._cu_seqlens_q = zeros(limits.max_num_rows + 1, dtype=torch.int32)
        self._seq_lens = zeros(limits.max_num_rows, dtype=torch.int32)
        self._block_table = zeros(limits.max_num_rows, limits.max_blocks_per_row, dtype=torch.int32)

    def prepare(self, plan: StepPlan, runner: StepRunner, leaves_out: bool) -> tuple[ForwardBatch, Layout]:
        """The step's batch, padded as ``runner`` wishes, and where each grant lies in it.

        Args:
            plan: with grants.
            runner: chooses the padded shape.
            leaves_out: the model honours ``StepShape.last_only``.
        """
        layout, batch = self._layout, self._batch
        if layout is not None and batch is not None and layout.serves(plan):
            torch.index_select(self._state.last_token, 0, layout.slots, out=batch.input_ids)
            batch = replace(batch, seq_lens_host=self._seq_lens_host(layout))
            self._fill(layout, new_blocks=any(grant.new_block_ids for grant in plan.grants))
        else:
            layout = self._new_layout(plan, runner, leaves_out)
            batch = self._view(layout)
            self._fill(layout)
        self._layout, self._batch = layout, batch
        return batch, layout

    def rehearsal(self, shape: StepShape) -> ForwardBatch:
        """A batch of padding rows alone: uniform ones if the shape is, else as few as hold its tokens."""
        query_lens = [shape.decode_query_len] * shape.num_rows
        if shape.gives != "logits":
            full, rest = divmod(shape.num_tokens, self._longest_padding)
            query_lens = [self._longest_padding] * full + [rest] * (rest > 0)
        self._layout = self._batch = None
        shape = StepShape.of(query_lens, shape.decode_query_len)
        layout = self._pack(shape, [], query_lens, np.zeros(shape.num_tokens, dtype=np.int64), decodes=False)
        self._fill(layout)
        return self._view(layout)

    def _new_layout(self, plan: StepPlan, runner: StepRunner, leaves_out: bool) -> Layout:
        """The plan's layout, padded, on the device; the token ids go straight to their buffer."""
        host = lay_out(plan, self._state)
        query_lens = query_lens_of(host.spans)
        first = host.spans[0]
        decodes = first.num_tokens == 1 and first.grant.samples
        decode_query_len = query_lens[0] if decodes else 0
        last_only = leaves_out and all(span.wants_last_only for span in host.spans)
        exact = StepShape.of(query_lens, decode_query_len, last_only)
        chosen = runner.shape(exact)
        query_lens += self._padding(exact, chosen, runner)
        shape = StepShape.of(query_lens, decode_query_len, last_only and chosen.last_only)
        ids = np.concatenate([host.input_ids, np.zeros(shape.num_tokens - exact.num_tokens, dtype=np.int64)])
        layout = self._pack(shape, host.spans, query_lens, ids, decodes=host.decodes)
        self._add_last_tokens(host)
        return layout

    def _pack(
        self, shape: StepShape, spans: list[RowSpan], query_lens: list[int], ids: np.ndarray, *, decodes: bool
    ) -> Layout:
        """Spans, and padding rows behind them, laid out on the device."""
        slots = [span.grant.slot for span in spans] + [self._state.padding_slot] * (len(query_lens) - len(spans))
        lens = np.asarray(query_lens, dtype=np.int64)
        ends = np.cumsum(lens)
        row_of_token = np.repeat(np.arange(len(lens)), lens)
        offsets = np.arange(shape.num_tokens) - (ends - lens)[row_of_token]
        pieces = [np.asarray(slots, dtype=np.int64), lens, row_of_token, offsets, ids]
        slot, query_len, row, offset, ids_there = self._upload(pieces)
        self._input_ids[: shape.num_tokens].copy_(ids_there)
        self._cu_seqlens_q[1 : shape.num_rows + 1].copy_(query_len.cumsum(0))
        steady = decodes and shape.num_tokens == shape.num_rows
        return Layout(shape, spans, steady, slot, query_len, row, offset, query_lens, slots)

    def _add_last_tokens(self, host: HostLayout) -> None:
        if host.last_token_at:
            at, slots = self._upload([np.asarray(host.last_token_at), np.asarray(host.last_token_slots)])
            self._input_ids.index_copy_(0, at, self._state.last_token.index_select(0, slots))

    @property
    def _longest_padding(self) -> int:
        """Tokens that any row may reach."""
        return min((self._limits.max_blocks_per_row - 1) * self._block_size + 1, self._limits.max_num_tokens)

    def _padding(self, exact: StepShape, chosen: StepShape, runner: StepRunner) -> list[int]:
        """The tokens of each padding row that the runner wants."""
        more_rows, more_tokens = chosen.num_rows - exact.num_rows, chosen.num_tokens - exact.num_tokens
        each, left = divmod(more_tokens, more_rows) if more_rows > 0 else (0, more_tokens)
        padding = [each + 1] * left + [each] * (more_rows - left) if more_rows > 0 else []
        fits = chosen.num_rows <= self._limits.max_num_rows and chosen.num_tokens <= self._limits.max_num_tokens
        possible = all(1 <= n <= self._longest_padding for n in padding)
        if sum(padding) != more_tokens or not possible or more_rows < 0 or not fits:
            raise PluginError(f"step runner {type(runner).__name__} chose shape {chosen} for {exact}")
        return padding

    def _view(self, layout: Layout) -> ForwardBatch:
        shape = layout.shape
        return ForwardBatch(
            shape=shape,
            input_ids=self._input_ids[: shape.num_tokens],
            positions=self._positions[: shape.num_tokens],
            slot_mapping=self._slot_mapping[: shape.num_tokens],
            cu_seqlens_q=self._cu_seqlens_q[: shape.num_rows + 1],
            seq_lens=self._seq_lens[: shape.num_rows],
            block_table=self._block_table[: shape.num_rows],
            query_lens_host=layout.query_lens_host,
            seq_lens_host=self._seq_lens_host(layout),
        )

    def _seq_lens_host(self, layout: Layout) -> list[int]:
        computed = [span.row.max_computed for span in layout.spans]
        computed += [0] * (len(layout.query_lens_host) - len(computed))
        return [c + n for c, n in zip(computed, layout.query_lens_host, strict=True)]

    def _fill(self, layout: Layout, *, new_blocks: bool = True) -> None:
        """Positions, lengths, slots, and block tables if they have changed, from the device's state of each row."""
        num_rows, num_tokens = layout.shape.num_rows, layout.shape.num_tokens
        positions, seq_lens = self._positions[:num_tokens], self._seq_lens[:num_rows]
        table = self._block_table[:num_rows]
        if new_blocks:
            torch.index_select(self._state.block_table, 0, layout.slots, out=table)
        if layout.decodes:
            torch.index_select(self._state.num_computed, 0, layout.slots, out=positions)
            torch.add(positions, 1, out=seq_lens)
            block = torch.div(positions, self._block_size, rounding_mode="floor")
            block_id = table.gather(1, block[:, None]).squeeze(1)
        else:
            computed = self._state.num_computed.index_select(0, layout.slots)
            torch.add(computed.index_select(0, layout.row_of_token), layout.offsets, out=positions)
            torch.add(computed, layout.query_lens, out=seq_lens)
            block = torch.div(positions, self._block_size, rounding_mode="floor")
            block_id = table.view(-1).index_select(0, layout.row_of_token * table.shape[1] + block)
        # (position within its block) + (block id) * size, as position - block * size + block id * size
        torch.add(positions, block_id - block, alpha=self._block_size, out=self._slot_mapping[:num_tokens])

    def sampling_rows(
        self, layout: Layout, late: LateInputs, positions: torch.Tensor
    ) -> tuple[torch.Tensor | None, SamplingRows, list[int]]:
        """Which positions draw.

        Returns:
            ([num_rows] where each drawing position's output is, or None if the first ones draw; the rows; drafts
            verified for each drawing span).
        """
        if layout.decodes:
            count = len(layout.spans)
            rows = SamplingRows(
                layout.slots[:count], positions[:count] + 1, None, layout.slots_host[:count], [0] * count
            )
            return None, rows, [0] * count
        token_index: list[int] = []
        slots: list[int] = []
        draft_index: list[int] = []
        num_drafts: list[int] = []
        before: list[list[int]] = []
        for span in layout.spans:
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
            padded = np.array([d + [-1] * (width - len(d)) for d in before], dtype=np.int64)
            drafts_before = self._upload([padded.ravel()])[0].view(-1, width)
        at, slot = self._upload([np.asarray(token_index), np.asarray(slots)])
        output_at = at
        if layout.shape.gives == "last":
            output_at = self._upload([np.asarray([i for i, s in enumerate(layout.spans) if s.grant.samples])])[0]
        rows = SamplingRows(slot, positions.index_select(0, at) + 1, drafts_before, slots, draft_index)
        return output_at, rows, num_drafts

    def _upload(self, pieces: list[np.ndarray]) -> tuple[torch.Tensor, ...]:
        """int64 arrays in one transfer that nobody waits for."""
        tensor = torch.from_numpy(np.concatenate(pieces).astype(np.int64, copy=False))
        if self._device.type == "cuda":
            tensor = tensor.pin_memory().to(self._device, non_blocking=True)
        return torch.split(tensor, [len(piece) for piece in pieces])
