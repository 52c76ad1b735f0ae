"""A step's answer: on its way to the host from the moment it is drawn, put into words when it is asked for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mini_infer.plan import RowOutput, StepOutput, TokenLogprobs
from mini_infer.sampling.logprobs import unpack_logprobs
from mini_infer.worker.host_copy import HostCopy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.worker.kv_store import KVStore
    from mini_infer.worker.layout import Layout


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step drew, its tensors on their way to the host.

    Attributes:
        layout: of the step.
        num_drafts: drafts verified for each drawing span; empty if none draws.
        copy: tokens [num_drawing_rows * width] and whether each position's logits were finite, in one int64 tensor;
            accepted drafts [num_drawing_rows] if there were drafts; log-probabilities as asked for.
        has_accepted: whether there were drafts.
        has_logprobs: whether drawing positions have theirs.
        prompt_spans: spans whose prompt positions have theirs.
    """

    layout: "Layout"
    num_drafts: list[int]
    copy: HostCopy
    has_accepted: bool
    has_logprobs: bool
    prompt_spans: list[int]

    @classmethod
    def launch(
        cls,
        layout: "Layout",
        device: str,
        prompt_logprobs: "Sequence[torch.Tensor | None]",
        num_drafts: "Sequence[int]" = (),
        emitted: torch.Tensor | None = None,
        num_accepted: torch.Tensor | None = None,
        ok: torch.Tensor | None = None,
        logprobs: torch.Tensor | None = None,
    ) -> "Drawn":
        """Start the copies.

        Args:
            layout: of the step.
            device: the tensors'.
            prompt_logprobs: of each span, packed; None if not asked for.
            num_drafts: of each drawing span.
            emitted: [num_drawing_rows, 1 + most drafts] int64, -1 past the accepted ones; None if no row draws.
            num_accepted: [num_drawing_rows] int64; None if there were no drafts.
            ok: [num_positions] bool, with ``emitted``.
            logprobs: of the drawing positions, packed; None if nobody asked.
        """
        tensors: list[torch.Tensor] = []
        if emitted is not None and ok is not None:
            tensors.append(torch.cat([emitted.reshape(-1), ok.to(torch.int64)]))
        tensors += [t for t in (num_accepted, logprobs) if t is not None]
        prompts = [i for i, packed in enumerate(prompt_logprobs) if packed is not None]
        tensors += [packed for packed in prompt_logprobs if packed is not None]
        copy = HostCopy(tensors, device)
        return cls(layout, list(num_drafts), copy, num_accepted is not None, logprobs is not None, prompts)


class PendingStep:
    """``interfaces.PendingOutput`` of a worker in this process.

    Args:
        step_id: the plan's.
        drawn: None if the plan granted nothing.
        kv_store: knows which copies the step ran.
        device: torch device string.
    """

    def __init__(self, step_id: int, drawn: Drawn | None, kv_store: "KVStore", device: str) -> None:
        self._step_id, self._drawn, self._kv_store = step_id, drawn, kv_store
        self._end = HostCopy([], device) if drawn is None else drawn.copy

    def result(self) -> StepOutput:
        """Wait for the device to reach the end of this step, and write the answer."""
        tensors = self._end.wait()
        rows = [] if self._drawn is None else self._rows(self._drawn, tensors)
        return StepOutput(self._step_id, rows, copies_done=self._kv_store.take_done(self._step_id))

    def _rows(self, drawn: Drawn, tensors: list[torch.Tensor]) -> list[RowOutput]:
        count = len(drawn.num_drafts)
        tokens: list[int] = tensors.pop(0).tolist() if count else []
        num_positions = count + sum(drawn.num_drafts)
        ok = tokens[len(tokens) - num_positions :]
        width = (len(tokens) - num_positions) // max(count, 1)
        accepted: list[int] = tensors.pop(0).tolist() if drawn.has_accepted else [0] * count
        logprobs = tensors.pop(0) if drawn.has_logprobs else None
        prompts = dict(zip(drawn.prompt_spans, tensors, strict=True))
        if drawn.layout.decodes and logprobs is None:
            return [RowOutput([token], ok=bool(fine)) for token, fine in zip(tokens[:count], ok, strict=True)]
        answers: list[RowOutput] = []
        row = first = 0  # drawing row; its first position among all drawing positions
        for index, span in enumerate(drawn.layout.spans):
            of_prompt = _unpack(prompts.get(index), span.row.params_prompt_logprobs)
            if not span.grant.samples:
                answers.append(RowOutput([], prompt_logprobs=of_prompt))
                continue
            emitted = tokens[row * width : row * width + accepted[row] + 1]
            span.row.max_computed -= span.num_drafts - accepted[row]  # the host's bound comes down to the truth
            last = first + len(emitted)
            answers.append(
                RowOutput(
                    token_ids=emitted,
                    ok=all(ok[first:last]),  # what a rejected draft gave does not count
                    logprobs=_unpack(None if logprobs is None else logprobs[first:last], span.row.params_logprobs),
                    prompt_logprobs=of_prompt,
                )
            )
            row, first = row + 1, first + 1 + drawn.num_drafts[row]
        return answers


def _unpack(packed: torch.Tensor | None, num_top: int | None) -> list[TokenLogprobs]:
    return [] if packed is None or num_top is None else unpack_logprobs(packed, [num_top] * len(packed))
