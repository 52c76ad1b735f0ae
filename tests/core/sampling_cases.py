"""Rows for the sampler's tests: what a worker would hand it, made from plain lists."""

from dataclasses import dataclass, field

import numpy as np
import torch

from mini_infer.interfaces.sampler import SamplingRows
from mini_infer.plan import NewRow
from mini_infer.sampling.sampler import ReferenceSampler
from mini_infer.sampling.state import SamplingState
from mini_infer.sampling_params import SamplingParams
from mini_infer.testing.reference_sampler import reference_next_token


@dataclass
class Case:
    """One row: a request, the drafts before its position, and its logits."""

    logits: np.ndarray
    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    seed: int = 0
    choice: int = 0

    @property
    def history(self) -> list[int]:
        return [*self.prompt, *self.output, *self.drafts]

    def new_row(self, slot: int) -> NewRow:
        tokens = self.prompt + self.output
        return NewRow(slot, tokens, len(self.prompt), 0, [], self.params, self.seed, self.choice)

    def expected(self, valid_vocab: int | None = None) -> int:
        history, num_prompt = self.history, len(self.prompt)
        t = len(history)
        return reference_next_token(
            self.logits, history, num_prompt, self.params, self.seed, t, self.choice, valid_vocab
        )


def rows_of(cases: list[Case], slots: list[int], device: torch.device | str = "cpu") -> SamplingRows:
    width = max((len(case.drafts) for case in cases), default=0)
    drafts = [case.drafts + [-1] * (width - len(case.drafts)) for case in cases]
    return SamplingRows(
        slots=torch.tensor(slots, device=device),
        positions=torch.tensor([len(case.history) for case in cases], device=device),
        drafts_before=torch.tensor(drafts, device=device) if width else None,
        slots_host=slots,
        draft_index_host=[len(case.drafts) for case in cases],
    )


def sample(
    cases: list[Case],
    slots: list[int] | None = None,
    state: SamplingState | None = None,
    valid_vocab: int | None = None,
) -> list[int]:
    """Tokens of all cases in one batch, on the state's device."""
    vocab_size = len(cases[0].logits)
    slots = list(range(len(cases))) if slots is None else slots
    if state is None:
        state = SamplingState(len(cases), vocab_size, "cpu", valid_vocab)
    for case, slot in zip(cases, slots, strict=True):
        state.add(case.new_row(slot))
    logits = torch.from_numpy(np.stack([case.logits for case in cases]).astype(np.float32)).to(state.device)
    return ReferenceSampler().sample(logits, rows_of(cases, slots, state.device), state).tolist()
