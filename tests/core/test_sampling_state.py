"""Sampling state: what a slot holds, that it is rebuilt after preemption, and that a released slot is as new."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.plan import NewRow
from mini_infer.sampling.state import SamplingState
from mini_infer.sampling_params import SamplingParams

VOCAB_SIZE = 12
PENALTIES = SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
EVERYTHING = SamplingParams(
    temperature=0.7,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias={3: 1.0, 4: -2.0},
)
HOST_SETS = (
    "sampled_slots",
    "top_k_slots",
    "top_p_slots",
    "min_p_slots",
    "penalty_slots",
    "bias_slots",
    "repetition_slots",
    "output_penalty_slots",
)


def new_row(slot: int, params: SamplingParams, tokens: list[int], num_prompt: int, seed: int = 2**63 + 5) -> NewRow:
    return NewRow(slot, tokens, num_prompt, 0, [], params, seed, choice=2)


def tensors(state: SamplingState) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(state).items() if isinstance(value, torch.Tensor)}


def fresh(num_slots: int = 4) -> SamplingState:
    return SamplingState(num_slots, VOCAB_SIZE, "cpu")


def test_a_slot_holds_the_request() -> None:
    state = fresh()
    state.add(new_row(1, EVERYTHING, [1, 2, 2, 5], num_prompt=2))
    assert state.temperature.tolist() == [0.0, pytest.approx(0.7), 0.0, 0.0, 0.0]
    assert state.top_k.tolist() == [12, 3, 12, 12, 12]
    assert state.top_p.tolist() == [1.0, 0.9, 1.0, 1.0, 1.0]
    assert state.min_p.tolist() == [0.0, pytest.approx(0.1), 0.0, 0.0, 0.0]
    assert state.seeds.tolist() == [0, 5 - 2**63, 0, 0, 0]
    assert state.choices.tolist() == [0, 2, 0, 0, 0]
    assert state.output_counts is not None and state.prompt_mask is not None
    assert state.output_counts[1].tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert state.prompt_mask[1].nonzero()[:, 0].tolist() == [1, 2]
    assert state.bias_slots == {1: 2}
    assert state.top_k_slots == {1: 3}
    assert all(list(getattr(state, name)) == [1] for name in HOST_SETS)


def test_greedy_rows_need_no_truncation() -> None:
    state = fresh()
    state.add(new_row(0, SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5), [1], 1))
    assert all(not getattr(state, name) for name in HOST_SETS)


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB_SIZE, 10**6])
def test_top_k_off(top_k: int) -> None:
    state = fresh()
    state.add(new_row(0, SamplingParams(top_k=top_k), [1], 1))
    assert state.top_k_slots == {}
    assert state.top_k[0] == VOCAB_SIZE


def test_large_tensors_come_with_the_first_request_that_needs_them() -> None:
    state = fresh()
    state.add(new_row(0, SamplingParams(temperature=1.0, top_p=0.5), [1], 1))
    assert state.output_counts is None and state.prompt_mask is None and state.bias_values is None
    state.record(torch.tensor([0]), torch.tensor([3]), [0])
    assert state.output_counts is None


def test_addresses_are_fixed() -> None:
    state = fresh()
    state.add(new_row(0, EVERYTHING, [1], 1))
    before = {name: tensor.data_ptr() for name, tensor in tensors(state).items()}
    for slot in (1, 2, 0):
        state.remove(slot)
        state.add(new_row(slot, EVERYTHING, [1, 2], 1))
        state.record(torch.tensor([slot]), torch.tensor([3]), [slot])
    assert {name: tensor.data_ptr() for name, tensor in tensors(state).items()} == before


def test_record_counts_only_rows_with_penalties_and_no_padding() -> None:
    state = fresh()
    state.add(new_row(0, PENALTIES, [1], 1))
    state.add(new_row(2, SamplingParams(), [1], 1))
    slots_host = [2, 0, state.padding_slot]
    state.record(torch.tensor(slots_host), torch.tensor([[5, 5, 6], [5, 5, -1], [0, -1, -1]]), slots_host)
    assert state.output_counts is not None
    assert state.output_counts[0].nonzero()[:, 0].tolist() == [5]
    assert state.output_counts[0, 5] == 2
    assert not state.output_counts[1:].any()


TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9)


@given(prompt=TOKENS, output=TOKENS, cut=st.integers(0, 9))
def test_counts_after_preemption_are_those_of_an_undisturbed_request(
    prompt: list[int], output: list[int], cut: int
) -> None:
    undisturbed, preempted = fresh(), fresh()
    undisturbed.add(new_row(1, EVERYTHING, prompt, len(prompt)))
    for token in output:
        undisturbed.record(torch.tensor([1]), torch.tensor([token]), [1])
    preempted.add(new_row(1, EVERYTHING, prompt + output[:cut], len(prompt)))
    for token in output[cut:]:
        preempted.record(torch.tensor([1]), torch.tensor([token]), [1])
    for name, tensor in tensors(undisturbed).items():
        assert torch.equal(tensor, tensors(preempted)[name]), name


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.5]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.sampled_from([{}, {0: 1.0, 7: -100.0}]),
)


@given(requests=st.lists(st.tuples(st.integers(0, 3), PARAMS, TOKENS, TOKENS), max_size=8))
def test_slot_reuse_leaves_no_trace(requests: list[tuple[int, SamplingParams, list[int], list[int]]]) -> None:
    state = fresh()
    taken: set[int] = set()
    for slot, params, tokens, output in requests:
        if slot in taken:
            state.remove(slot)
        taken.add(slot)
        state.add(new_row(slot, params, tokens, len(tokens)))
        slots_host = [slot] * len(output)
        state.record(torch.tensor(slots_host), torch.tensor(output), slots_host)
    for slot in taken:
        state.remove(slot)
    clean = tensors(fresh())
    for name, tensor in tensors(state).items():
        assert torch.equal(tensor, clean.get(name, torch.zeros_like(tensor))), name
    assert all(not getattr(state, name) for name in HOST_SETS)


def test_invalid_ids() -> None:
    assert SamplingState(1, 6, "cpu").invalid_token_ids is None
    assert SamplingState(1, 6, "cpu", 6).invalid_token_ids is None
    for state in (SamplingState(1, 6, "cpu", 4), SamplingState(1, 6, "cpu", invalid_token_ids=[5, 4])):
        assert state.invalid_token_ids is not None
        assert state.invalid_token_ids.tolist() == [4, 5]
    holes = SamplingState(1, 6, "cpu", 5, [2]).invalid_token_ids
    assert holes is not None
    assert holes.tolist() == [2, 5]
