"""Acceptance: a draft stands exactly if it is what would have been drawn, so drafts never change the output."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.interfaces.sampler import SamplingRows
from mini_infer.plan import NewRow
from mini_infer.sampling.acceptance import accept, accept_matrix, last_tokens, pad_rows
from mini_infer.sampling.sampler import ReferenceSampler
from mini_infer.sampling.state import SamplingState
from mini_infer.sampling_params import SamplingParams
from mini_infer.testing.reference_sampler import reference_next_token


def by_hand(sampled: list[int], drafts: list[int]) -> list[int]:
    for i, draft in enumerate(drafts):
        if sampled[i] != draft:
            return sampled[: i + 1]
    return sampled


SMALL = st.integers(0, 2)
ROW = st.integers(0, 4).flatmap(
    lambda k: st.tuples(st.lists(SMALL, min_size=k + 1, max_size=k + 1), st.lists(SMALL, min_size=k, max_size=k))
)


@given(rows=st.lists(ROW, min_size=1, max_size=6))
def test_against_plain_python(rows: list[tuple[list[int], list[int]]]) -> None:
    tokens = torch.tensor([token for sampled, _ in rows for token in sampled])
    emitted, num_accepted = accept(tokens, [drafts for _, drafts in rows])
    last = last_tokens(emitted, num_accepted)
    for i, (sampled, drafts) in enumerate(rows):
        right = by_hand(sampled, drafts)
        padding = emitted.shape[1] - len(right)
        assert emitted[i].tolist() == right + [-1] * padding
        assert num_accepted[i] == len(right) - 1
        assert last[i] == right[-1]


def test_padding_is_never_accepted() -> None:
    sampled = torch.tensor([[4, -1, -1], [-1, -1, -1], [4, 5, 6]])
    drafts = torch.tensor([[-1, -1], [-1, -1], [4, 5]])
    emitted, num_accepted = accept_matrix(sampled, drafts)
    assert emitted.tolist() == [[4, -1, -1], [-1, -1, -1], [4, 5, 6]]
    assert num_accepted.tolist() == [0, 0, 2]


def test_pad_rows() -> None:
    values = torch.arange(5)
    assert pad_rows(values, [2, 0, 3]).tolist() == [[0, 1, -1], [-1, -1, -1], [2, 3, 4]]
    assert pad_rows(values, [1, 4], width=4).tolist() == [[0, -1, -1, -1], [1, 2, 3, 4]]
    assert pad_rows(values, [1] * 5).tolist() == [[0], [1], [2], [3], [4]]


VOCAB_SIZE = 6
PENALTIES = {"presence_penalty": 0.8, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
TABLE = np.random.default_rng(0).normal(size=(2**10, VOCAB_SIZE)).astype(np.float32)


def model(history: list[int]) -> np.ndarray:
    """Logits that depend on the whole history."""
    return TABLE[hash(tuple(history)) % len(TABLE)]


@pytest.mark.parametrize(
    "penalties", [{}, {"presence_penalty": 0.8, "frequency_penalty": 0.3, "repetition_penalty": 1.2}]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("max_drafts", [0, 1, 3])
def test_output_with_drafts_is_output_without(penalties: dict[str, float], temperature: float, max_drafts: int) -> None:
    """Two requests side by side with random drafts of random number; one is preempted half-way."""
    params = SamplingParams(temperature=temperature, **penalties)
    prompts, seeds, length = [[1, 2], [3]], [5, 2**64 - 7], 24
    state = SamplingState(2, VOCAB_SIZE, "cpu")
    histories = [list(prompt) for prompt in prompts]
    for slot in (0, 1):
        state.add(NewRow(slot, histories[slot], len(prompts[slot]), 0, [], params, seeds[slot], 0))
    rng = np.random.default_rng(max_drafts)
    accepted = 0
    for step in range(length):
        if step == length // 2:
            state.remove(1)
            state.add(NewRow(1, list(histories[1]), len(prompts[1]), 0, [], params, seeds[1], 0))
        drafts = [rng.integers(0, VOCAB_SIZE, size=rng.integers(0, max_drafts + 1)).tolist() for _ in prompts]
        places = [(slot, drafts[slot][:i]) for slot in (0, 1) for i in range(len(drafts[slot]) + 1)]
        logits = torch.from_numpy(np.stack([model(histories[slot] + before) for slot, before in places]))
        tokens = ReferenceSampler().sample(logits, verify_rows(places, histories), state)
        emitted, num_accepted = accept(tokens, drafts)
        state.record(torch.tensor([0, 1]), emitted, [0, 1])
        for slot in (0, 1):
            histories[slot] += emitted[slot, : num_accepted[slot] + 1].tolist()
        accepted += int(num_accepted.sum())
    for prompt, seed, history in zip(prompts, seeds, histories, strict=True):
        assert history == without_drafts(prompt, seed, params, len(history))
    assert (accepted > 0) == (max_drafts > 0)


def verify_rows(places: list[tuple[int, list[int]]], histories: list[list[int]]) -> SamplingRows:
    slots, befores = [slot for slot, _ in places], [before for _, before in places]
    width = max(map(len, befores))
    padded = [before + [-1] * (width - len(before)) for before in befores]
    return SamplingRows(
        slots=torch.tensor(slots),
        positions=torch.tensor([len(histories[slot]) + len(before) for slot, before in places]),
        drafts_before=torch.tensor(padded) if width else None,
        slots_host=slots,
        draft_index_host=[len(before) for before in befores],
    )


def without_drafts(prompt: list[int], seed: int, params: SamplingParams, length: int) -> list[int]:
    history = list(prompt)
    while len(history) < length:
        history.append(reference_next_token(model(history), history, len(prompt), params, seed, len(history)))
    return history
