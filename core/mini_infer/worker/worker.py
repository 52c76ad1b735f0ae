"""One rank's half of a step: apply the plan, run the model, draw tokens, answer.

Contract: a plan is the only input, an answer the only output; all other state lives in slots. Host synchronisation
happens in ``PendingStep.result`` alone. Rows are independent: logits that are not finite flag their own row only.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mini_infer.plan import LateInputs, NewRow, RowOutput, StepOutput, StepPlan, TokenLogprobs
from mini_infer.sampling.acceptance import accept
from mini_infer.sampling.logprobs import token_logprobs
from mini_infer.sampling.state import to_device
from mini_infer.worker.batch_state import BatchState
from mini_infer.worker.kv_store import KVStore
from mini_infer.worker.step_inputs import RowSpan, StepInputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.forward_batch import ForwardBatch
    from mini_infer.interfaces.attention import AttentionBackend, BatchLimits
    from mini_infer.interfaces.model import CausalLM
    from mini_infer.interfaces.sampler import LogitsProcessor, Sampler, SamplingRows
    from mini_infer.interfaces.step_runner import StepRunner
    from mini_infer.sampling.state import SamplingState

LOGPROB_ROWS = 256
"""Prompt positions whose logits are made at once: bounds memory at that many times the vocabulary."""


@dataclass(slots=True)
class WorkerParts:
    """What the build step composed for one rank."""

    model: "CausalLM"
    backends: "Sequence[AttentionBackend]"  # one a KV group
    kv_store: KVStore
    sampler: "Sampler"
    sampling_state: "SamplingState"
    logits_processors: "Sequence[LogitsProcessor]"
    step_runner: "StepRunner"
    limits: "BatchLimits"
    max_num_seqs: int
    device: str


class Worker:
    """Runs plans on one device."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._state = BatchState.make(parts.max_num_seqs, parts.limits.max_blocks_per_row, parts.device)
        self._inputs = StepInputs(self._state, parts.limits, parts.device)
        self._processed: dict[int, list[LogitsProcessor]] = {}  # slot -> processors that want it
        for backend in parts.backends:
            backend.buffers(parts.limits)
        self._step: _Forwarded | None = None

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Apply the plan's differences and launch the forward pass."""
        self._step = None
        self._parts.kv_store.run(plan.copies)
        for slot in plan.released:
            self._release(slot)
        for new in plan.new:
            self._enter(new)
        for grant in plan.grants:
            self._state.grow(grant)
        if not plan.grants:
            self._step = _Forwarded(plan, None, [], None)
            return
        batch, spans = self._inputs.prepare(plan, self._parts.step_runner)
        for backend in self._parts.backends:
            backend.prepare(batch)
        hidden = self._parts.step_runner.run(self._run_model, batch)
        self._step = _Forwarded(plan, batch, spans, hidden)

    @torch.inference_mode()
    def sample(self, late: LateInputs) -> "PendingStep":
        """Launch drawing tokens for the last forward pass."""
        step = self._step
        assert step is not None, "sample follows forward"
        if step.batch is None or step.hidden is None:
            return PendingStep(self, step, None)
        return PendingStep(self, step, self._draw(step, step.batch, step.hidden, late))

    def _run_model(self, batch: "ForwardBatch") -> torch.Tensor:
        return self._parts.model.forward(batch.input_ids, batch.positions, batch)

    # -- slots --------------------------------------------------------------------------------------------------------

    def _enter(self, new: NewRow) -> None:
        self._state.enter(new)
        self._parts.sampling_state.add(new)
        for processor in self._parts.logits_processors:
            if processor.wants(new.params):
                self._processed.setdefault(new.slot, []).append(processor)
                processor.add(new)

    def _release(self, slot: int) -> None:
        self._state.clear(slot)
        self._parts.sampling_state.remove(slot)
        for processor in self._processed.pop(slot, ()):
            processor.remove(slot)

    # -- drawing ------------------------------------------------------------------------------------------------------

    def _draw(self, step: "_Forwarded", batch: "ForwardBatch", hidden: torch.Tensor, late: LateInputs) -> "_Drawn":
        prompt_logprobs = [self._prompt_logprobs(span, hidden) for span in step.spans]
        drawing = [span for span in step.spans if span.grant.samples]
        emitted = num_accepted = ok = raw = None
        num_drafts: list[int] = []
        if drawing:
            token_index, rows, num_drafts = self._inputs.sampling_rows(step.spans, late, batch.positions)
            logits = self._parts.model.logits(hidden.index_select(0, token_index)).float()
            # NaN and both infinities show in the extremes: no mask of the logits' size is made.
            ok = torch.isfinite(logits.amax(dim=-1)) & torch.isfinite(logits.amin(dim=-1))
            raw = self._keep_raw(logits, rows)
            if self._processed or late.masks:
                logits = self._process(logits, rows, late)
                ok = ok & torch.isfinite(logits.amax(dim=-1))  # something must be left to draw
            tokens = self._parts.sampler.sample(logits, rows, self._parts.sampling_state)
            drafts = [s.grant.draft_token_ids[:n] for s, n in zip(drawing, num_drafts, strict=True)]
            emitted, num_accepted = accept(tokens, drafts)
        self._advance(step.spans, emitted, num_accepted)
        return _Drawn(emitted, num_accepted, ok, raw, num_drafts, prompt_logprobs)

    def _keep_raw(self, logits: torch.Tensor, rows: "SamplingRows") -> torch.Tensor | None:
        wanted = any(self._state.rows[slot].params_logprobs is not None for slot in rows.slots_host)
        return logits.clone() if wanted else None

    def _process(self, logits: torch.Tensor, rows: "SamplingRows", late: LateInputs) -> torch.Tensor:
        if self._processed:
            for processor in self._parts.logits_processors:
                mine = [i for i, s in enumerate(rows.slots_host) if processor in self._processed.get(s, ())]
                if mine:
                    logits = processor.apply(logits, rows, mine)
        if late.masks:
            logits = _apply_masks(logits, rows, late)
        return logits

    def _advance(self, spans: list[RowSpan], emitted: torch.Tensor | None, num_accepted: torch.Tensor | None) -> None:
        """Move the device's rows past this step: lengths, last tokens, penalty counts."""
        state = self._state
        device = state.num_computed.device
        all_slots = to_device([s.grant.slot for s in spans], torch.int64, device)
        state.num_computed.index_add_(0, all_slots, to_device([s.num_tokens for s in spans], torch.int64, device))
        for span in spans:
            span.row.max_computed += span.num_tokens + span.num_drafts
        if emitted is None or num_accepted is None:
            return
        slots_host = [s.grant.slot for s in spans if s.grant.samples]
        slots = to_device(slots_host, torch.int64, device)
        state.num_computed.index_add_(0, slots, num_accepted)
        state.last_token.index_copy_(0, slots, emitted.gather(1, num_accepted[:, None]).squeeze(1))
        self._parts.sampling_state.record(slots, emitted, slots_host)

    def _prompt_logprobs(self, span: RowSpan, hidden: torch.Tensor) -> list[TokenLogprobs]:
        row = span.row
        if row.params_prompt_logprobs is None:
            return []
        # The logits at position p are about the token at p + 1.
        targets = row.token_ids[span.first_position + 1 : span.first_position + span.num_tokens + 1]
        targets = targets[: max(0, row.num_prompt_tokens - span.first_position - 1)]
        found: list[TokenLogprobs] = []
        for first in range(0, len(targets), LOGPROB_ROWS):
            ids = torch.from_numpy(targets[first : first + LOGPROB_ROWS]).to(hidden.device)
            start = span.start + first
            logits = self._parts.model.logits(hidden[start : start + len(ids)])
            found += token_logprobs(logits, ids, [row.params_prompt_logprobs] * len(ids))
        return found

    # -- answering ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def answer(self, step: "_Forwarded", drawn: "_Drawn | None") -> StepOutput:
        """Wait for the step and write its answer."""
        rows = [] if drawn is None else self._answer_rows(step, drawn)
        return StepOutput(step.plan.step_id, rows, copies_done=self._parts.kv_store.take_done())

    def _answer_rows(self, step: "_Forwarded", drawn: "_Drawn") -> list[RowOutput]:
        emitted: list[list[int]] = [] if drawn.emitted is None else drawn.emitted.tolist()
        accepted: list[int] = [] if drawn.num_accepted is None else drawn.num_accepted.tolist()
        ok: list[bool] = [] if drawn.ok is None else drawn.ok.tolist()
        answers: list[RowOutput] = []
        row = first = 0  # drawing row; its first position among all drawing positions
        for span, prompt_logprobs in zip(step.spans, drawn.prompt_logprobs, strict=True):
            if not span.grant.samples:
                answers.append(RowOutput([], prompt_logprobs=prompt_logprobs))
                continue
            tokens = emitted[row][: accepted[row] + 1]
            span.row.max_computed -= span.num_drafts - accepted[row]  # the host's bound comes down to the truth
            answers.append(
                RowOutput(
                    token_ids=tokens,
                    ok=all(ok[first : first + len(tokens)]),  # what a rejected draft gave does not count
                    logprobs=self._logprobs(span, drawn.raw, first, tokens),
                    prompt_logprobs=prompt_logprobs,
                )
            )
            row, first = row + 1, first + 1 + drawn.num_drafts[row]
        return answers

    def _logprobs(self, span: RowSpan, raw: torch.Tensor | None, first: int, tokens: list[int]) -> list[TokenLogprobs]:
        if raw is None or span.row.params_logprobs is None:
            return []
        ids = to_device(tokens, torch.int64, raw.device)
        return token_logprobs(raw[first : first + len(tokens)], ids, [span.row.params_logprobs] * len(tokens))


@dataclass(frozen=True, slots=True)
class _Forwarded:
    plan: StepPlan
    batch: "ForwardBatch | None"
    spans: list[RowSpan]
    hidden: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Drawn:
    emitted: torch.Tensor | None  # [num_drawing_rows, 1 + max_drafts] int64, -1 past the accepted ones
    num_accepted: torch.Tensor | None  # [num_drawing_rows] int64
    ok: torch.Tensor | None  # [num_positions] bool
    raw: torch.Tensor | None  # [num_positions, vocab_size] float32 before any processing
    num_drafts: list[int]
    prompt_logprobs: list[list[TokenLogprobs]]


class PendingStep:
    """``interfaces.PendingOutput`` of a worker in this process."""

    def __init__(self, worker: Worker, step: _Forwarded, drawn: _Drawn | None) -> None:
        self._worker, self._step, self._drawn = worker, step, drawn

    def result(self) -> StepOutput:
        """Wait for the device and write the answer."""
        return self._worker.answer(self._step, self._drawn)


def _apply_masks(logits: torch.Tensor, rows: "SamplingRows", late: LateInputs) -> torch.Tensor:
    vocab_size = logits.shape[1]
    for index, (slot, j) in enumerate(zip(rows.slots_host, rows.draft_index_host, strict=True)):
        masks = late.masks.get(slot, [])
        if j < len(masks) and masks[j]:
            packed = torch.frombuffer(bytearray(masks[j]), dtype=torch.uint8).to(logits.device)
            bits = (packed[:, None] >> torch.arange(8, device=logits.device, dtype=torch.uint8)) & 1
            allowed = torch.zeros(vocab_size, dtype=torch.bool, device=logits.device)
            width = min(vocab_size, bits.numel())
            allowed[:width] = bits.flatten()[:width].bool()
            logits[index].masked_fill_(~allowed, float("-inf"))
    return logits
