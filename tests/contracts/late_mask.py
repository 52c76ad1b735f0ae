"""Probe: a mask that depends on the last token, so it arrives after the forward pass and voids drafts."""

from mini_infer.interfaces import LateLogitsProcessor, LateRequest, SamplingParams
from mini_infer.plugins import hookimpl

NAME = "late-mask"


def allows(previous: int, token: int) -> bool:
    """A third of all tokens may not follow, another third after each token."""
    return (previous + token) % 3 != 0


class LateMask(LateLogitsProcessor):
    """For requests with ``extensions["late-mask"]``."""

    name = NAME

    def __init__(self) -> None:
        self.num_masks = self.num_voided = 0
        self.live: set[str] = set()

    def wants(self, params: SamplingParams) -> bool:
        return NAME in params.extensions

    def masks(self, request: LateRequest, drafts: list[int]) -> tuple[list[bytes], int]:
        self.live.add(request.view.request_id)
        previous = [*request.prompt_token_ids, *request.output_token_ids][-1]
        masks = [self.mask(previous, request.vocab_size)]
        for draft in drafts:
            if not allows(previous, draft):
                break
            masks.append(self.mask(draft, request.vocab_size))
            previous = draft
        self.num_masks += 1
        self.num_voided += len(drafts) + 1 - len(masks)
        return masks, len(masks) - 1

    def mask(self, previous: int, vocab_size: int) -> bytes:
        bits = sum(1 << token for token in range(vocab_size) if allows(previous, token))
        return bits.to_bytes(-(-vocab_size // 8), "little")

    def released(self, request_id: str) -> None:
        self.live.discard(request_id)


class Probe:
    name = NAME
    api_version = 0

    def __init__(self) -> None:
        self.made = LateMask()

    @hookimpl
    def logits_processors(self, context):
        return [self.made]
