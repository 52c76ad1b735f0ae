"""What sampling needs to know of each request: parameters, penalty counts, bias and seeds, one slot a request.

Contract: the parameter tensors have fixed addresses from construction on; the larger ones (penalty counts, prompt
mask, bias) come with the first request that needs them and stay. ``remove`` leaves no trace of a request in its slot.
Host-side sets of slots say which rows need what, so that a step is planned without a device synchronisation. Slot
``max_num_seqs`` is the padding row: greedy, nothing else.
"""

from typing import TYPE_CHECKING

import torch

from mini_infer.sampling.noise import as_int64
from mini_infer.sampling_params import MAX_LOGIT_BIAS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mini_infer.plan import NewRow
    from mini_infer.sampling_params import SamplingParams

_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny  # a temperature above 0 stays above 0 in float32


def to_device(values: "Sequence[int] | Sequence[float]", dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A 1-D tensor of host values on ``device``, without waiting for work already queued there."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def _has_penalties(params: "SamplingParams") -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class SamplingState:
    """Sampling parameters by slot, on the device, with the host's view of who needs what.

    Args:
        max_num_seqs: slots for requests; one more, the last, is the padding row.
        vocab_size: width of the logits.
        device: where the logits are.
        num_valid_tokens: ids from here on are unknown to the tokenizer and never sampled; None if all are known.
        invalid_token_ids: further ids that are never sampled (holes in the tokenizer's vocabulary).

    Attributes:
        temperature: [num_slots] float32; 0 is greedy.
        top_k: [num_slots] int64; ``vocab_size`` is off.
        top_p: [num_slots] float64 (a boundary such as 0.3 of ten equal tokens is exact); 1 is off.
        min_p: [num_slots] float32; 0 is off.
        repetition_penalty: [num_slots] float32; 1 is off.
        presence_penalty: [num_slots] float32; 0 is off.
        frequency_penalty: [num_slots] float32; 0 is off.
        seeds: [num_slots] int64, two's complement of the unsigned 64-bit seeds.
        choices: [num_slots] int64.
        output_counts: [num_slots, vocab_size] int32, how often each token is in the output; None before first use.
        prompt_mask: [num_slots, vocab_size] bool, which tokens are in the prompt; None before first use.
        bias_token_ids: [num_slots, 1024] int64, 0 padded; None before first use.
        bias_values: [num_slots, 1024] float32, 0 padded; None before first use.
        invalid_token_ids: [n] int64, ids that are never sampled; None if there are none.
        sampled_slots: slots with a temperature above 0. The three sets below hold no others.
        top_k_slots: slots with top-k on, and the k of each.
        top_p_slots: slots with top-p on.
        min_p_slots: slots with min-p on.
        penalty_slots: slots with any penalty on.
        repetition_slots: those with a repetition penalty.
        output_penalty_slots: those with a presence or frequency penalty.
        bias_slots: slots with a logit bias, and the number of entries of each.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device | str,
        num_valid_tokens: int | None = None,
        invalid_token_ids: "Iterable[int]" = (),
    ) -> None:
        self.vocab_size = vocab_size
        self.num_slots = max_num_seqs + 1
        self.padding_slot = max_num_seqs
        self.device = torch.device(device)

        def column(off: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((self.num_slots,), off, dtype=dtype, device=self.device)

        self.temperature = column(0.0, torch.float32)
        self.top_k = column(vocab_size, torch.int64)
        self.top_p = column(1.0, torch.float64)
        self.min_p = column(0.0, torch.float32)
        self.repetition_penalty = column(1.0, torch.float32)
        self.presence_penalty = column(0.0, torch.float32)
        self.frequency_penalty = column(0.0, torch.float32)
        self.seeds = column(0, torch.int64)
        self.choices = column(0, torch.int64)
        self._counted = column(0, torch.int32)  # 1 where ``record`` counts

        self.output_counts: torch.Tensor | None = None
        self.prompt_mask: torch.Tensor | None = None
        self.bias_token_ids: torch.Tensor | None = None
        self.bias_values: torch.Tensor | None = None

        self.sampled_slots: set[int] = set()
        self.top_k_slots: dict[int, int] = {}
        self.top_p_slots: set[int] = set()
        self.min_p_slots: set[int] = set()
        self.penalty_slots: set[int] = set()
        self.repetition_slots: set[int] = set()
        self.output_penalty_slots: set[int] = set()
        self.bias_slots: dict[int, int] = {}

        first_invalid = vocab_size if num_valid_tokens is None else min(num_valid_tokens, vocab_size)
        invalid = sorted({*invalid_token_ids, *range(first_invalid, vocab_size)})
        self.invalid_token_ids = to_device(invalid, torch.int64, self.device) if invalid else None

    def add(self, *rows: "NewRow") -> None:
        """Requests enter at their slots, which must be free. Counts are rebuilt from tokens after preemption."""
        slots = [row.slot for row in rows]
        self._write(self.seeds, slots, [as_int64(row.seed) for row in rows])
        self._write(self.choices, slots, [row.choice for row in rows])
        self._add_sampling([row for row in rows if row.params.temperature > 0.0])
        for row in rows:
            if _has_penalties(row.params):
                self._add_penalties(row)
            if row.params.logit_bias:
                self._add_bias(row.slot, row.params.logit_bias)

    def _write(self, column: torch.Tensor, slots: "Sequence[int]", values: "Sequence[int] | Sequence[float]") -> None:
        if slots:
            index = to_device(slots, torch.int64, self.device)
            column.index_copy_(0, index, to_device(values, column.dtype, self.device))

    def _add_sampling(self, rows: "Sequence[NewRow]") -> None:
        top_k = {row.slot: row.params.top_k for row in rows if 0 < row.params.top_k < self.vocab_size}
        top_p = {row.slot: row.params.top_p for row in rows if row.params.top_p < 1.0}
        min_p = {row.slot: row.params.min_p for row in rows if row.params.min_p > 0.0}
        slots = [row.slot for row in rows]
        self._write(self.temperature, slots, [max(row.params.temperature, _SMALLEST_TEMPERATURE) for row in rows])
        self._write(self.top_k, list(top_k), list(top_k.values()))
        self._write(self.top_p, list(top_p), list(top_p.values()))
        self._write(self.min_p, list(min_p), list(min_p.values()))
        self.sampled_slots.update(slots)
        self.top_k_slots.update(top_k)
        self.top_p_slots.update(top_p)
        self.min_p_slots.update(min_p)

    def _add_penalties(self, row: "NewRow") -> None:
        params, slot = row.params, row.slot
        if self.output_counts is None or self.prompt_mask is None:
            shape = (self.num_slots, self.vocab_size)
            self.output_counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self.prompt_mask = torch.zeros(shape, dtype=torch.bool, device=self.device)
        self.penalty_slots.add(slot)
        if params.repetition_penalty != 1.0:
            self.repetition_slots.add(slot)
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self.output_penalty_slots.add(slot)
        self._counted[slot].fill_(1)
        self.repetition_penalty[slot].fill_(params.repetition_penalty)
        self.presence_penalty[slot].fill_(params.presence_penalty)
        self.frequency_penalty[slot].fill_(params.frequency_penalty)
        tokens = to_device(row.token_ids, torch.int64, self.device)
        prompt, output = tokens[: row.num_prompt_tokens], tokens[row.num_prompt_tokens :]
        self.prompt_mask[slot].index_fill_(0, prompt, True)
        self.output_counts[slot].scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _add_bias(self, slot: int, logit_bias: dict[int, float]) -> None:
        if self.bias_token_ids is None or self.bias_values is None:
            shape = (self.num_slots, MAX_LOGIT_BIAS)
            self.bias_token_ids = torch.zeros(shape, dtype=torch.int64, device=self.device)
            self.bias_values = torch.zeros(shape, dtype=torch.float32, device=self.device)
        count = len(logit_bias)
        self.bias_slots[slot] = count
        self.bias_token_ids[slot, :count] = to_device(list(logit_bias), torch.int64, self.device)
        self.bias_values[slot, :count] = to_device(list(logit_bias.values()), torch.float32, self.device)

    def remove(self, *slots: int) -> None:
        """The requests at ``slots`` are released; the slots are as if never used."""
        if not slots:
            return
        index = to_device(slots, torch.int64, self.device)
        for column, off in self._columns_and_off_values():
            column.index_fill_(0, index, off)
        for slot in self.penalty_slots.intersection(slots):
            assert self.output_counts is not None and self.prompt_mask is not None
            self.output_counts[slot].zero_()
            self.prompt_mask[slot].zero_()
        for slot in self.bias_slots.keys() & set(slots):
            assert self.bias_token_ids is not None and self.bias_values is not None
            self.bias_token_ids[slot].zero_()
            self.bias_values[slot].zero_()
            del self.bias_slots[slot]
        for group in (
            self.sampled_slots,
            self.top_p_slots,
            self.min_p_slots,
            self.penalty_slots,
            self.repetition_slots,
            self.output_penalty_slots,
        ):
            group.difference_update(slots)
        for slot in slots:
            self.top_k_slots.pop(slot, None)

    def _columns_and_off_values(self) -> list[tuple[torch.Tensor, float]]:
        return [
            (self.temperature, 0.0),
            (self.top_k, self.vocab_size),
            (self.top_p, 1.0),
            (self.min_p, 0.0),
            (self.repetition_penalty, 1.0),
            (self.presence_penalty, 0.0),
            (self.frequency_penalty, 0.0),
            (self.seeds, 0),
            (self.choices, 0),
            (self._counted, 0),
        ]

    def greedy(self, slots_host: "Sequence[int]") -> bool:
        """Whether all of these want their most likely token, with neither penalties nor bias."""
        special = (self.sampled_slots, self.penalty_slots, self.bias_slots.keys())
        return not any(special) or all(group.isdisjoint(slots_host) for group in special)

    def record(self, slots: torch.Tensor, token_ids: torch.Tensor, slots_host: "Sequence[int]") -> None:
        """Accepted tokens join the output that penalties count. Rows without penalties are passed over.

        Args:
            slots: [num_rows] int64.
            token_ids: [num_rows] or [num_rows, width] int64; -1 is no token.
            slots_host: the same as ``slots``, on the host.
        """
        if self.output_counts is None or self.penalty_slots.isdisjoint(slots_host):
            return
        tokens = token_ids.reshape(slots.shape[0], -1)
        cells = slots[:, None] * self.vocab_size + tokens.clamp(min=0)
        counted = self._counted[slots][:, None] * (tokens >= 0)
        self.output_counts.view(-1).scatter_add_(0, cells.view(-1), counted.view(-1).to(torch.int32))
