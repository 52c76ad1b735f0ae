"""DeviceSampler: the reference's tokens in a few launches, no vocabulary sorted, nothing waited for.

Contract: tokens are the reference's: ties go to the lowest id, and bfloat16 logits compare as the float32 numbers that
they are. Which kernels a step needs is known from the host's sets of slots; which of its rows they are about, they read
on the device. Scratch memory is under 70 KiB a row, a tenth of its logits.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from mini_infer.interfaces.sampler import Sampler, SamplingRows
from mini_infer.sampling_params import MAX_LOGIT_BIAS
from mini_infer_plugins.device_sampler import cut_kernels, kernels

if TYPE_CHECKING:
    from mini_infer.sampling.state import SamplingState

_BLOCK = 1024
_PIVOTS_BLOCK = 256  # times 16 pivots, in registers
_PROGRAMS = 1024  # that keep a large card busy
_ROOM = 4096  # places between the bounds of a cut; with more, a row is searched whole
_ALL_VOCABULARIES = 1 << 22  # tokens that a place has room for


@dataclass(frozen=True, slots=True)
class _Parts:
    """How the rows of a step are cut: the same for all of its kernels."""

    rows: int
    count: int
    size: int
    padded: int  # the same for any number of rows, so that kernels are compiled once

    @classmethod
    def of(cls, logits: torch.Tensor) -> "_Parts":
        rows, vocab_size = logits.shape
        blocks = triton.cdiv(vocab_size, _BLOCK)
        size = triton.cdiv(blocks, max(1, min(blocks, triton.cdiv(_PROGRAMS, rows)))) * _BLOCK
        return cls(rows, triton.cdiv(vocab_size, size), size, triton.next_power_of_2(blocks))

    @property
    def grid(self) -> tuple[int, int]:
        return self.rows, self.count


class DeviceSampler(Sampler):
    """See the module."""

    def __init__(self) -> None:
        self._invalid: tuple[torch.Tensor, torch.Tensor] | None = None  # ids, and the mask made of them

    def greedy(self, logits: torch.Tensor, invalid_token_ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Sampler.greedy``."""
        parts = _Parts.of(logits)
        return self._most_likely(self._best_of_parts(logits, parts, invalid_token_ids, draw=False), logits, parts)

    def sample(self, logits: torch.Tensor, rows: SamplingRows, state: "SamplingState") -> torch.Tensor:
        """See ``Sampler.sample``."""
        return self.prepare(logits, rows, state).tokens()

    def prepare(self, logits: torch.Tensor, rows: SamplingRows, state: "SamplingState") -> "Draw":
        """All but the draw itself: logits adjusted in place, and which tokens may be drawn."""
        slots, parts = rows.slots_host, _Parts.of(logits)
        if not state.penalty_slots.isdisjoint(slots):
            _penalise(logits, rows, state, parts)
        if not state.bias_slots.keys().isdisjoint(slots):
            kernels.bias_kernel[parts.rows,](
                logits, rows.slots, state.bias_token_ids, state.bias_values, logits.stride(0), WIDTH=MAX_LOGIT_BIAS
            )
        best = self._best_of_parts(logits, parts, state.invalid_token_ids, draw=True)
        draw = Draw(logits, rows, state, parts, best)
        if not state.top_k_slots.keys().isdisjoint(slots):
            draw.cut(state.top_k, mass=False)
        if not state.top_p_slots.isdisjoint(slots):
            draw.cut(state.top_p, mass=True)
        return draw

    def _best_of_parts(
        self, logits: torch.Tensor, parts: _Parts, invalid_token_ids: torch.Tensor | None, draw: bool
    ) -> tuple[torch.Tensor, ...]:
        """Of each part of a row: the largest logit, its lowest id, whether all are finite, and the lowest logit."""
        best = torch.empty(parts.grid, dtype=torch.float32, device=logits.device)
        lowest = torch.empty_like(best)
        best_id, fine = torch.empty_like(best, dtype=torch.int32), torch.empty_like(best, dtype=torch.int32)
        mask = None if invalid_token_ids is None else self._mask(invalid_token_ids, logits.shape[1])
        kernels.best_of_part_kernel[parts.grid](
            logits, logits if mask is None else mask, best, best_id, fine, lowest, logits.stride(0),
            logits.shape[1], parts.size, INVALID=mask is not None, DRAW=draw, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
        return best, best_id, fine, lowest

    def _most_likely(
        self, best: tuple[torch.Tensor, ...], logits: torch.Tensor, parts: _Parts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.empty(parts.rows, dtype=torch.int64, device=logits.device)
        ok = torch.empty(parts.rows, dtype=torch.bool, device=logits.device)
        kernels.best_of_row_kernel[parts.rows,](
            *best[:3], tokens, ok, parts.count, logits.shape[1], PADDED_PARTS=parts.padded, num_warps=1
        )
        return tokens, ok

    def _mask(self, invalid_token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """[vocab_size] uint8, made once."""
        known = self._invalid
        if known is None or known[0] is not invalid_token_ids or len(known[1]) != vocab_size:
            mask = torch.zeros(vocab_size, dtype=torch.uint8, device=invalid_token_ids.device)
            known = self._invalid = invalid_token_ids, mask.index_fill_(0, invalid_token_ids, 1)
        return known[1]


def _penalise(logits: torch.Tensor, rows: SamplingRows, state: "SamplingState", parts: _Parts) -> None:
    assert state.output_counts is not None and state.prompt_mask is not None  # made with the first penalty slot
    drafts = rows.drafts_before
    num_drafts, stride = (0, 0) if drafts is None else (drafts.shape[1], drafts.stride(0))
    kernels.penalise_kernel[parts.grid](
        logits, rows.slots, rows.slots if drafts is None else drafts, state.repetition_penalty, state.presence_penalty,
        state.frequency_penalty, state.output_counts, state.prompt_mask.view(torch.uint8), logits.stride(0), stride,
        num_drafts, state.vocab_size, parts.size, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


class Draw:
    """One step's draw: logits adjusted, their maxima known.

    Attributes:
        cuts: [rows] int64, the place from which on tokens are kept; None if no row has top-k or top-p.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        state: "SamplingState",
        parts: _Parts,
        best: tuple[torch.Tensor, ...],
    ) -> None:
        assert state.vocab_size <= _ALL_VOCABULARIES
        self._logits, self._rows, self._state, self._parts = logits, rows, state, parts
        self._best, self._lowest = best[:2], best[3]
        self.cuts: torch.Tensor | None = None

    def cut(self, limits: torch.Tensor, mass: bool) -> None:
        """Keep the first k tokens of a row, or the first that have p of the probability of those kept so far.

        Args:
            limits: [num_slots], k or p of each slot.
            mass: whether they are p.
        """
        parts, state = self._parts, self._state
        if self.cuts is None:
            self.cuts = self._empty(parts.rows, dtype=torch.int64).zero_()
        sums = self._empty(cut_kernels.NUM_ROUNDS.value, *parts.grid, cut_kernels.NUM_PIVOTS.value, dtype=torch.float32)
        places = self._empty(parts.rows, _ROOM, dtype=torch.int64)
        num_places = self._empty(parts.rows, dtype=torch.int32).zero_()
        totals, above = (self._empty(*parts.grid, dtype=torch.int64) for _ in range(2))
        about = (self._logits, self._rows.slots, state.temperature, limits, state.top_k, *self._best, self.cuts)
        shape = (self._logits.stride(0), state.vocab_size)
        fixed: dict[str, Any] = {"MASS": mass, "ROOM": _ROOM, "PADDED_PARTS": parts.padded, "enable_fp_fusion": False}
        for num_rounds in range(cut_kernels.NUM_ROUNDS.value):
            cut_kernels.weigh_pivots_kernel[parts.grid](
                *about, self._lowest, sums, *shape, parts.size, parts.rows, parts.count, num_rounds,
                BLOCK=_PIVOTS_BLOCK, num_warps=4, **fixed,
            )  # fmt: skip
        cut_kernels.gather_kernel[parts.grid](
            *about, self._lowest, sums, places, num_places, totals, above, *shape, parts.size, parts.rows, parts.count,
            BLOCK=_BLOCK, num_warps=4, **fixed,
        )  # fmt: skip
        cut_kernels.find_cut_kernel[parts.rows,](
            *about, places, num_places, totals, above, *shape, parts.count,
            BLOCK=_BLOCK, num_warps=8, **fixed,
        )  # fmt: skip

    def tokens(self) -> torch.Tensor:
        """[rows] int64."""
        parts, state, rows = self._parts, self._state, self._rows
        num_blocks = triton.cdiv(state.vocab_size, _BLOCK)
        rough = self._empty(parts.rows, num_blocks, dtype=torch.float32)
        tokens = self._empty(parts.rows, dtype=torch.int64)
        about = (
            self._logits, rows.slots, rows.positions, state.temperature, state.min_p, state.seeds, state.choices,
            *self._best, rough if self.cuts is None else self.cuts, rough,
        )  # fmt: skip
        shape = (self._logits.stride(0), state.vocab_size)
        fixed: dict[str, Any] = {
            "CUT": self.cuts is not None, "BLOCK": _BLOCK, "PADDED_PARTS": parts.padded, "enable_fp_fusion": False,
        }  # fmt: skip
        if not state.sampled_slots.isdisjoint(rows.slots_host):
            kernels.draw_from_part_kernel[parts.grid](*about, *shape, parts.size, parts.count, num_blocks, **fixed)
        kernels.draw_from_row_kernel[parts.rows,](
            *about, tokens, *shape, parts.count, num_blocks, PADDED_BLOCKS=triton.next_power_of_2(num_blocks), **fixed
        )
        return tokens

    def _empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._logits.device)
