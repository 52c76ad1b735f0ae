"""One rank's half of a step: apply the plan, run the model, draw tokens, answer.

Contract: a plan is the only input, an answer the only output; all other state lives in slots. The host waits for the
device in ``PendingStep.result`` alone, and there only for its own step. Rows are independent: logits that are not
finite flag their own row only.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mini_infer.errors import PluginError
from mini_infer.plan import LateInputs, StepPlan
from mini_infer.sampling.acceptance import accept
from mini_infer.sampling.greedy import all_finite
from mini_infer.sampling.logprobs import pack_logprobs
from mini_infer.sampling.state import to_device
from mini_infer.worker.answer import Drawn, PendingStep
from mini_infer.worker.batch_state import BatchState
from mini_infer.worker.kv_store import KVStore
from mini_infer.worker.layout import Layout, RowSpan
from mini_infer.worker.step_inputs import StepInputs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mini_infer.forward_batch import ForwardBatch, StepShape
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

    @property
    def num_rehearsals(self) -> int:
        """Shapes that ``rehearse`` runs."""
        return len(self._parts.step_runner.rehearsals())

    @torch.inference_mode()
    def rehearse(self) -> "Iterator[StepShape]":
        """Run each shape that the step runner wants to have run before the first request; yields it when it has."""
        for shape in self._parts.step_runner.rehearsals():
            batch = self._inputs.rehearsal(shape)
            for backend in self._parts.backends:
                backend.prepare(batch)
            out = self._parts.step_runner.run(self._run_model, batch)
            if batch.shape.gives == "logits":
                self._parts.sampler.greedy(out, self._parts.sampling_state.invalid_token_ids)
            yield shape

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Apply the plan's differences and launch the forward pass."""
        self._step = None
        self._parts.kv_store.run(plan.copies, plan.step_id)
        self._apply(plan)
        if not plan.grants:
            self._step = _Forwarded(plan, None, None)
            return
        batch, layout = self._inputs.prepare(plan, self._parts.step_runner, self._parts.model.leaves_out)
        for backend in self._parts.backends:
            backend.prepare(batch)
        out = self._parts.step_runner.run(self._run_model, batch)
        if batch.shape.gives == "last" and len(out) != batch.shape.num_rows:
            raise PluginError(
                f"{type(self._parts.model).__name__} gave {len(out)} outputs for the last tokens of "
                f"{batch.shape.num_rows} rows: its last layer, or what replaces it, must honour StepShape.last_only"
            )
        self._step = _Forwarded(plan, batch, _Output(self._parts.model, layout, out))

    @torch.inference_mode()
    def sample(self, late: LateInputs) -> PendingStep:
        """Launch drawing tokens for the last forward pass."""
        step = self._step
        assert step is not None, "sample follows forward"
        drawn = None if step.batch is None or step.output is None else self._draw(step.output, step.batch, late)
        return PendingStep(step.plan.step_id, drawn, self._parts.kv_store, self._parts.device)

    def _run_model(self, batch: "ForwardBatch") -> torch.Tensor:
        """What the shape gives: logits if every token may draw, so that a device graph holds them too."""
        hidden = self._parts.model.forward(batch.input_ids, batch.positions, batch)
        return self._parts.model.logits(hidden) if batch.shape.gives == "logits" else hidden

    # -- slots --------------------------------------------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        if plan.released:
            self._state.clear(plan.released)
            self._parts.sampling_state.remove(*plan.released)
            for slot in plan.released:
                for processor in self._processed.pop(slot, ()):
                    processor.remove(slot)
        if plan.new:
            self._state.enter(plan.new)
            self._parts.sampling_state.add(*plan.new)
            for new in plan.new:
                self._processed[new.slot] = [p for p in self._parts.logits_processors if p.wants(new.params)]
                for processor in self._processed[new.slot]:
                    processor.add(new)
        self._state.extend(plan.new, plan.grants)

    # -- drawing ------------------------------------------------------------------------------------------------------

    def _draw(self, output: "_Output", batch: "ForwardBatch", late: LateInputs) -> Drawn:
        spans = output.layout.spans
        prompt_logprobs = [self._prompt_logprobs(span, output) for span in spans]
        drawing = [span for span in spans if span.grant.samples]
        if not drawing:
            self._advance(output.layout, drawing, None, None)
            return Drawn.launch(output.layout, self._parts.device, prompt_logprobs)
        output_index, rows, num_drafts = self._inputs.sampling_rows(output.layout, late, batch.positions)
        logits = output.logits(output_index, len(rows.slots_host))
        if self._is_greedy(rows, late):
            tokens, ok = self._parts.sampler.greedy(logits, self._parts.sampling_state.invalid_token_ids)
            logprobs = None
        else:
            tokens, ok, logprobs = self._sample(logits.float(), rows, late)
        drafts = [s.grant.draft_token_ids[:n] for s, n in zip(drawing, num_drafts, strict=True)]
        emitted, num_accepted = accept(tokens, drafts) if any(drafts) else (tokens[:, None], None)
        self._advance(output.layout, drawing, emitted, num_accepted)
        return Drawn.launch(
            output.layout, self._parts.device, prompt_logprobs, num_drafts, emitted, num_accepted, ok, logprobs
        )

    def _is_greedy(self, rows: "SamplingRows", late: LateInputs) -> bool:
        changed = self._changes_logits(rows, late) or self._wants_logprobs(rows)
        return not changed and self._parts.sampling_state.greedy(rows.slots_host)

    def _changes_logits(self, rows: "SamplingRows", late: LateInputs) -> bool:
        return bool(late.masks) or any(self._processed.get(slot) for slot in rows.slots_host)

    def _wants_logprobs(self, rows: "SamplingRows") -> bool:
        return any(self._state.rows[slot].params_logprobs is not None for slot in rows.slots_host)

    def _sample(
        self, logits: torch.Tensor, rows: "SamplingRows", late: LateInputs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Tokens, whether each row was fit to be drawn from, log-probabilities if anybody wants them."""
        ok = all_finite(logits)
        raw = self._keep_raw(logits, rows)
        if self._changes_logits(rows, late):
            logits = self._process(logits, rows, late)
            ok = ok & torch.isfinite(logits.amax(dim=-1))  # something must be left to draw
        tokens = self._parts.sampler.sample(logits, rows, self._parts.sampling_state)
        return tokens, ok, None if raw is None else self._logprobs(raw, tokens, rows)

    def _keep_raw(self, logits: torch.Tensor, rows: "SamplingRows") -> torch.Tensor | None:
        return logits.clone() if self._wants_logprobs(rows) else None

    def _logprobs(self, raw: torch.Tensor, tokens: torch.Tensor, rows: "SamplingRows") -> torch.Tensor:
        """Of every drawing position, as ``pack_logprobs`` does; those that nobody asked for are passed over later."""
        return pack_logprobs(raw, tokens, max(self._state.rows[slot].params_logprobs or 0 for slot in rows.slots_host))

    def _process(self, logits: torch.Tensor, rows: "SamplingRows", late: LateInputs) -> torch.Tensor:
        for processor in self._parts.logits_processors:
            mine = [i for i, s in enumerate(rows.slots_host) if processor in self._processed.get(s, ())]
            if mine:
                logits = processor.apply(logits, rows, mine)
        if late.masks:
            logits = _apply_masks(logits, rows, late)
        return logits

    def _advance(
        self,
        layout: Layout,
        drawing: list[RowSpan],
        emitted: torch.Tensor | None,
        num_accepted: torch.Tensor | None,
    ) -> None:
        """Move the device's rows past this step: lengths, last tokens, penalty counts."""
        state, device, spans = self._state, self._state.num_computed.device, layout.spans
        for span in spans:
            span.row.max_computed += span.num_tokens + span.num_drafts
        slots = layout.slots[: len(spans)]
        if layout.decodes:
            state.num_computed.index_add_(0, slots, layout.query_lens[: len(spans)])
        else:
            lens = to_device([span.num_tokens for span in spans], torch.int64, device)
            state.num_computed.index_add_(0, slots, lens)
        if emitted is None:
            return
        slots_host = [span.grant.slot for span in drawing]
        if len(drawing) < len(spans):
            slots = to_device(slots_host, torch.int64, device)
        last = emitted[:, 0]
        if num_accepted is not None:
            state.num_computed.index_add_(0, slots, num_accepted)
            last = emitted.gather(1, num_accepted[:, None]).squeeze(1)
        state.last_token.index_copy_(0, slots, last)
        self._parts.sampling_state.record(slots, emitted, slots_host)

    def _prompt_logprobs(self, span: RowSpan, output: "_Output") -> torch.Tensor | None:
        row = span.row
        if row.params_prompt_logprobs is None:
            return None
        # The logits at position p are about the token at p + 1.
        targets = row.token_ids[span.first_position + 1 : span.first_position + span.num_tokens + 1]
        targets = targets[: max(0, row.num_prompt_tokens - span.first_position - 1)]
        found: list[torch.Tensor] = []
        for first in range(0, len(targets), LOGPROB_ROWS):
            ids = torch.from_numpy(targets[first : first + LOGPROB_ROWS]).to(self._parts.device)
            start = span.start + first
            found.append(pack_logprobs(output.logits_at(start, start + len(ids)), ids, row.params_prompt_logprobs))
        return torch.cat(found) if found else None


@dataclass(frozen=True, slots=True)
class _Output:
    """What a forward pass gave."""

    model: "CausalLM"
    layout: Layout
    out: torch.Tensor  # as ``layout.shape.gives`` says

    def logits(self, index: torch.Tensor | None, count: int) -> torch.Tensor:
        """[count, vocab_size] of the rows of ``out`` given; of the first ``count`` if None."""
        chosen = self.out[:count] if index is None else self.out.index_select(0, index)
        return chosen if self.layout.shape.gives == "logits" else self.model.logits(chosen)

    def logits_at(self, first: int, last: int) -> torch.Tensor:
        """Of the tokens ``first`` to ``last``, of which every one has its output."""
        return self.out[first:last] if self.layout.shape.gives == "logits" else self.model.logits(self.out[first:last])


@dataclass(frozen=True, slots=True)
class _Forwarded:
    plan: StepPlan
    batch: "ForwardBatch | None"
    output: _Output | None


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
