"""What needs the last step's tokens before it can draw the next: masks made on the host while the forward pass runs.

Contract: only rows whose request a ``LateLogitsProcessor`` wants wait for it. Several masks on one position allow what
all of them allow.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mini_infer.engine.request import Request, Status
from mini_infer.errors import PluginError
from mini_infer.interfaces.sampler import LateLogitsProcessor, LateRequest
from mini_infer.plan import LateInputs, StepPlan

if TYPE_CHECKING:
    from mini_infer.interfaces.scheduler import RequestView
    from mini_infer.sampling_params import SamplingParams

NOTHING_LATE = LateInputs()


class _Late(LateRequest):
    def __init__(self, request: Request, vocab_size: int) -> None:
        self.view: RequestView = request.view
        self.params: SamplingParams = request.spec.params
        self.prompt_token_ids = request.spec.prompt_token_ids
        self.output_token_ids = request.output_token_ids
        self.vocab_size = vocab_size


class LateMasks:
    """Asks each late processor for the masks of the requests that it wants."""

    def __init__(self, processors: Sequence[LateLogitsProcessor], vocab_size: int) -> None:
        self._processors = processors
        self._vocab_size = vocab_size
        self._wanted: dict[str, list[LateLogitsProcessor]] = {}  # by request id

    def enter(self, request: Request) -> None:
        """A request arrived."""
        wanted = [p for p in self._processors if p.wants(request.spec.params)]
        if wanted:
            self._wanted[request.request_id] = wanted

    def leave(self, request: Request) -> None:
        """A request ended."""
        for processor in self._wanted.pop(request.request_id, ()):
            processor.released(request.request_id)

    def concerns(self, requests: Sequence[Request]) -> bool:
        """Whether any of these has to wait for the last step's tokens."""
        return bool(self._wanted) and any(r.request_id in self._wanted for r in requests)

    def inputs(self, plan: StepPlan, requests: Sequence[Request]) -> LateInputs:
        """Masks, and drafts that they void, for a step whose requests' tokens have all been read."""
        if not self.concerns(requests):
            return NOTHING_LATE
        masks: dict[int, list[bytes]] = {}
        kept_drafts: dict[int, int] = {}
        for grant, request in zip(plan.grants, requests, strict=True):
            wanted = self._wanted.get(request.request_id, ())
            if not wanted or not grant.samples or request.status is Status.FINISHED:
                continue
            late = _Late(request, self._vocab_size)
            answers = [processor.masks(late, grant.draft_token_ids) for processor in wanted]
            kept = min(kept for _, kept in answers)
            for processor, (given, its_kept) in zip(wanted, answers, strict=True):
                if len(given) != its_kept + 1 or not 0 <= its_kept <= len(grant.draft_token_ids):
                    raise PluginError(
                        f"logits processor {processor.name!r} gave {len(given)} masks for {its_kept} drafts"
                    )
            masks[grant.slot] = [_all_of([given[i] for given, _ in answers]) for i in range(kept + 1)]
            if kept < len(grant.draft_token_ids):
                kept_drafts[grant.slot] = kept
        return LateInputs(masks, kept_drafts)


def _all_of(masks: list[bytes]) -> bytes:
    real = [mask for mask in masks if mask]
    if len(real) <= 1:
        return real[0] if real else b""
    width = max(map(len, real))
    both = int.from_bytes(real[0], "little")
    for mask in real[1:]:
        both &= int.from_bytes(mask, "little")
    return both.to_bytes(width, "little")
