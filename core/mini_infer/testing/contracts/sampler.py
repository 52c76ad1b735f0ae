"""The contract of ``Sampler``: each row's token is what the definition says, whatever stands beside it or was before.

The definition is ``testing.reference_sampler``, numpy that shares no code with the engine. A sampler that adds in
float32 may differ where two scores are closer than rounding: where tokens differ, the reference's margin between the
two must be under 1e-5 of the logits' standard deviation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest
import torch

from mini_infer.interfaces import NewRow, Sampler, SamplingParams, SamplingRows
from mini_infer.sampling.state import SamplingState
from mini_infer.testing.reference_sampler import margin, reference_next_token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

MARGIN = 1e-5


def sampler_suite(
    make: Callable[[], Sampler], *, device: str = "cpu", vocab_sizes: Sequence[int] = (31, 320, 5000)
) -> type[SamplerSuite]:
    """Tests of a sampler: ``TestMine = sampler_suite(MySampler)``.

    Args:
        make: a fresh one; called for each test.
        device: where the logits are.
        vocab_sizes: widths of the logits.
    """
    attributes = {"make": staticmethod(make), "device": device, "vocab_sizes": tuple(vocab_sizes)}
    return type("SamplerSuite", (SamplerSuite,), attributes)


@dataclass(frozen=True)
class Case:
    """One row to draw: a request, the drafts before its position, and its logits."""

    logits: NDArray[np.float32]
    params: SamplingParams
    seed: int = 0
    choice: int = 0
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    drafts: tuple[int, ...] = field(default=())

    @property
    def history(self) -> list[int]:
        return [*self.prompt, *self.output, *self.drafts]

    def new_row(self, slot: int) -> NewRow:
        """The request as it enters, its output so far known (after a preemption, say)."""
        tokens = [*self.prompt, *self.output]
        return NewRow(slot, tokens, len(self.prompt), 0, [], self.params, self.seed, self.choice)

    def expect(self, token: int) -> None:
        """Raise unless ``token`` is what the definition draws, or as good as that."""
        about = (self.logits, self.history, len(self.prompt), self.params, self.seed, len(self.history), self.choice)
        expected = reference_next_token(*about)
        if token != expected:
            lead = margin(*about, other=token) / max(float(self.logits.std()), 1e-9)
            assert lead < MARGIN, f"drew {token}, not {expected}, which leads by {lead:.3g} deviations: {self.params}"


def random_case(rng: Random, vocab_size: int) -> Case:
    """A row of any kind: every parameter is on in some of them, logits with and without ties."""

    def maybe(*values: float) -> float:
        return rng.choice([values[0], values[0], *values])

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(rng.randint(0, most)))

    noise = np.random.default_rng(rng.randrange(2**32)).normal(scale=rng.choice([0.3, 3.0]), size=vocab_size)
    logits = np.round(noise * 2) / 2 if rng.random() < 0.3 else noise
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 1e-6, 0.5, 1.0, 1.0, 2.0]),
        top_k=int(maybe(0, -1, 1, 2, 20, vocab_size, 10**6)),
        top_p=maybe(1.0, 0.0, 0.2, 0.9),
        min_p=maybe(0.0, 0.05, 0.5, 1.0),
        repetition_penalty=maybe(1.0, 0.6, 1.4),
        presence_penalty=maybe(0.0, -1.0, 0.7),
        frequency_penalty=maybe(0.0, -0.5, 0.4),
        logit_bias={token: rng.choice([-100.0, -2.0, 3.0]) for token in tokens(6)} if rng.random() < 0.3 else {},
    )
    return Case(
        logits=logits.astype(np.float32),
        params=params,
        seed=rng.choice([0, 2**64 - 1, rng.randrange(2**64)]),
        choice=rng.choice([0, 0, 3]),
        prompt=(rng.randrange(vocab_size), *tokens(12)),
        output=tokens(12),
        drafts=rng.choice([(), tokens(4)]),
    )


class SamplerSuite:
    """The tests; ``sampler_suite`` fills in what they are about."""

    device: ClassVar[str]
    vocab_sizes: ClassVar[tuple[int, ...]]

    @staticmethod
    def make() -> Sampler:
        raise NotImplementedError

    def state(self, cases: Sequence[Case], first_slot: int = 0) -> SamplingState:
        """A state with case i in slot ``first_slot`` + i."""
        state = SamplingState(first_slot + len(cases), len(cases[0].logits), self.device)
        for slot, case in enumerate(cases, first_slot):
            state.add(case.new_row(slot))
        return state

    def draw(
        self,
        sampler: Sampler,
        cases: Sequence[Case],
        state: SamplingState | None = None,
        slots: Sequence[int] | None = None,
    ) -> list[int]:
        """Tokens of all cases in one batch; case i is in slot i of a state of its own if none are given."""
        state = self.state(cases) if state is None else state
        slots = list(range(len(cases)) if slots is None else slots)
        width = max(len(case.drafts) for case in cases)
        drafts = [[*case.drafts, *[-1] * (width - len(case.drafts))] for case in cases]
        rows = SamplingRows(
            slots=torch.tensor(slots, device=self.device),
            positions=torch.tensor([len(case.history) for case in cases], device=self.device),
            drafts_before=torch.tensor(drafts, device=self.device) if width else None,
            slots_host=slots,
            draft_index_host=[len(case.drafts) for case in cases],
        )
        logits = torch.from_numpy(np.stack([case.logits for case in cases])).to(self.device)
        tokens = sampler.sample(logits, rows, state)
        assert tokens.shape == (len(cases),), f"tokens are {tuple(tokens.shape)}, not [{len(cases)}]"
        assert tokens.dtype == torch.int64, f"tokens are {tokens.dtype}, not int64"
        assert tokens.device.type == logits.device.type, f"tokens are on {tokens.device}, logits on {logits.device}"
        return [int(token) for token in tokens]

    def batches(self, count: int) -> list[list[Case]]:
        """Random batches, a few of each vocabulary."""
        rng = Random(count)
        return [
            [random_case(rng, vocab_size) for _ in range(rng.randint(1, 8))]
            for vocab_size in self.vocab_sizes
            for _ in range(count)
        ]

    def test_every_row_draws_what_the_definition_says(self) -> None:
        sampler = self.make()
        for cases in self.batches(30):
            for case, token in zip(cases, self.draw(sampler, cases), strict=True):
                case.expect(token)

    def test_the_batch_does_not_matter(self) -> None:
        """Alone, in another order, in other slots: the same token, to the bit."""
        sampler = self.make()
        for cases in self.batches(8):
            together = self.draw(sampler, cases)
            assert [self.draw(sampler, [case])[0] for case in cases] == together, "a row alone draws another token"
            assert self.draw(sampler, cases[::-1]) == together[::-1], "the order of rows matters"
            shifted = self.draw(sampler, cases, self.state(cases, 3), range(3, 3 + len(cases)))
            assert shifted == together, "the slot matters"

    def test_nothing_of_a_request_reaches_the_next_one_in_its_slot(self) -> None:
        sampler, rng = self.make(), Random(1)
        for cases in self.batches(8):
            state = self.state([random_case(rng, len(cases[0].logits)) for _ in cases])
            for slot, case in enumerate(cases):
                state.remove(slot)
                state.add(case.new_row(slot))
            assert self.draw(sampler, cases, state) == self.draw(sampler, cases), "a reused slot draws otherwise"

    def test_tokens_recorded_by_the_core_count_as_output(self) -> None:
        """A request that drew tokens, and one that entered with them, are the same."""
        sampler = self.make()
        for batch in self.batches(8):
            state, slots = self.state(batch), list(range(len(batch)))
            for token in (1, 2, 1):
                drawn = torch.full((len(batch),), token, device=self.device)
                state.record(torch.tensor(slots, device=self.device), drawn, slots)
            cases = [replace(case, output=(*case.output, 1, 2, 1)) for case in batch]
            assert self.draw(sampler, cases, state) == self.draw(sampler, cases), "recorded tokens do not count"

    def test_many_positions_of_one_request_in_one_step(self) -> None:
        """Drafts being verified: rows of one slot that differ by the drafts before them."""
        sampler, rng = self.make(), Random(0)
        for vocab_size in self.vocab_sizes:
            for _ in range(6):
                case = random_case(rng, vocab_size)
                drafts = tuple(rng.randrange(vocab_size) for _ in range(3))
                cases = [replace(case, drafts=drafts[:count]) for count in range(4)]
                for each, token in zip(cases, self.draw(sampler, cases, self.state(cases[:1]), [0] * 4), strict=True):
                    each.expect(token)

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_what_may_not_be_drawn_is_not_drawn(self, temperature: float) -> None:
        """A mask leaves -inf; one token that is left is drawn at any temperature."""
        sampler = self.make()
        for vocab_size in self.vocab_sizes:
            logits = np.full((3, vocab_size), -np.inf, dtype=np.float32)
            left = [0, vocab_size // 2, vocab_size - 1]
            logits[range(3), left] = -7.0
            params = SamplingParams(temperature=temperature)
            cases = [Case(row, params, seed=index) for index, row in enumerate(logits)]
            assert self.draw(sampler, cases) == left, "a masked token was drawn"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_greedy_gives_the_lowest_id_of_the_largest_logit(self, dtype: torch.dtype) -> None:
        """Also where ids are invalid, and where other rows are not finite; those are flagged."""
        sampler, rng = self.make(), np.random.default_rng(0)
        for vocab_size in self.vocab_sizes:
            values = rng.integers(-9, 4, (7, vocab_size)).astype(np.float32)  # many ties
            bad = {1: np.nan, 3: np.inf, 4: -np.inf}
            for row, value in bad.items():
                values[row, rng.integers(vocab_size)] = value
            good = [row for row in range(len(values)) if row not in bad]
            for invalid in ([], [0, vocab_size - 1], [int(values[0].argmax())]):
                logits = torch.tensor(values, dtype=dtype, device=self.device)
                ids = torch.tensor(invalid, device=self.device) if invalid else None
                tokens, ok = sampler.greedy(logits, ids)
                assert tokens.dtype == torch.int64 and ok.dtype == torch.bool, f"{tokens.dtype} and {ok.dtype}"
                assert ok.tolist() == [row in good for row in range(len(values))], "the wrong rows are flagged"
                allowed = values.copy()
                allowed[:, invalid] = -np.inf
                assert tokens[good].tolist() == allowed[good].argmax(axis=1).tolist(), "not the lowest of the largest"
                assert 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size, "a token outside the vocabulary"
