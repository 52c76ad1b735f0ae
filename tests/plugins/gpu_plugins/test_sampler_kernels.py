"""device-sampler's kernels: the contract, the edges, and on a GPU the vocabulary of a large model.

``make test-kernels`` runs them in Triton's interpreter, ``pytest -m gpu`` on a CUDA device; the bodies are the same.
"""

import os
from dataclasses import replace
from random import Random

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

from mini_infer.interfaces import SamplingParams, SamplingRows
from mini_infer.sampling.noise import gumbel
from mini_infer.sampling.sampler import ReferenceSampler
from mini_infer.sampling.state import SamplingState
from mini_infer.sampling.truncation import truncate
from mini_infer.testing.contracts import sampler_suite
from mini_infer.testing.contracts.sampler import Case, random_case
from mini_infer_plugins.device_sampler import sampler
from mini_infer_plugins.device_sampler.kernels import (
    FLOOR,
    FLOOR_BITS,
    SCORE_ERROR,
    exact_gumbel,
    rough_gumbel,
    word_of,
)
from mini_infer_plugins.device_sampler.sampler import DeviceSampler

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
FULL_WIDTH = 152_064  # Qwen2.5-7B's
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

TestDeviceSampler = sampler_suite(DeviceSampler, device=DEVICE, vocab_sizes=(1100,) if INTERPRETED else (31, 320, 5000))

draw = sampler_suite(DeviceSampler, device=DEVICE)().draw
draw_by_reference = sampler_suite(ReferenceSampler)().draw


def state_of(cases: list[Case], device: str, num_valid: int | None = None) -> SamplingState:
    state = SamplingState(len(cases), len(cases[0].logits), device, num_valid)
    state.add(*(case.new_row(slot) for slot, case in enumerate(cases)))
    return state


def expect_the_reference(cases: list[Case], num_valid: int | None = None) -> list[int]:
    """Exactly its tokens, which rules out near ties: the cases here have none."""
    drawn = draw(DeviceSampler(), cases, state_of(cases, DEVICE, num_valid))
    assert drawn == draw_by_reference(ReferenceSampler(), cases, state_of(cases, "cpu", num_valid))
    return drawn


def logits_of(vocab_size: int, scale: float = 3.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=scale, size=vocab_size).astype(np.float32)


@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 1400},
        {"top_p": 0.0},
        {"top_p": 1e-9},
        {"top_p": 0.3},
        {"top_p": 1 - 1e-12},
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.1},
        {"min_p": 1.0},
        {"min_p": 1e-30},
        {"temperature": 1e-7, "top_p": 0.9},
        {"temperature": 1e6, "top_k": 1400},
    ],
    ids=str,
)
def test_limits(limits: dict[str, float]) -> None:
    """Spread logits, few values with many ties, all equal, as good as certain."""
    params = SamplingParams(**limits)
    spread = logits_of(1500)
    kinds = [spread, np.round(spread), np.zeros_like(spread), np.where(np.arange(1500) == 700, 50.0, spread)]
    expect_the_reference([Case(k.astype(np.float32), params, seed=s) for s, k in enumerate(kinds)])


@pytest.mark.parametrize("top_k", [1, 30, 1000, 1500])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.999, 1.0])
def test_the_tokens_kept_are_exactly_the_references(top_k: int, top_p: float) -> None:
    """A few draws would not show a token too many or too few."""
    params = [SamplingParams(top_k=top_k, top_p=top_p, temperature=t) for t in (0.5, 1.0, 3.0)]
    cases = [Case(np.round(logits_of(1500, seed=s) * 8) / 8, p) for s, p in enumerate(params)]
    state, logits = state_of(cases, DEVICE), torch.from_numpy(np.stack([case.logits for case in cases]))
    slots = torch.arange(3, device=DEVICE)
    draws = DeviceSampler().prepare(logits.to(DEVICE), SamplingRows(slots, slots, None, [0, 1, 2], [0] * 3), state)
    cuts = torch.zeros(3, dtype=torch.int64) if draws.cuts is None else draws.cuts.cpu()

    z = (logits - logits.amax(1, keepdim=True)) / state.temperature[:3, None].cpu()
    limits = (state.top_k[:3].cpu(), state.top_p[:3].cpu(), torch.zeros(3))
    ids, values, _ = truncate(z, *limits, num_candidates=1500)
    expected = torch.zeros_like(z, dtype=torch.bool).scatter_(1, ids, values > -torch.inf) & (z >= FLOOR.value)
    places = (FLOOR_BITS.value - z.abs().view(torch.int32).long() << 22) | (2**22 - 1 - torch.arange(1500))
    assert torch.equal(places >= cuts[:, None], expected)


@pytest.mark.parametrize("limits", [{"top_k": 300}, {"top_p": 0.7}, {"top_k": 900, "top_p": 0.5}], ids=str)
def test_rows_searched_whole(limits: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens when more places lie around the cut than there is room for."""
    monkeypatch.setattr(sampler, "_ROOM", 2)
    params, logits = SamplingParams(**limits), np.round(logits_of(1500, scale=1.0))
    expect_the_reference([Case(logits, params, seed=seed) for seed in range(2)])


def test_ties_at_the_boundary_go_to_the_lower_ids() -> None:
    logits = np.full(1500, -50.0, dtype=np.float32)
    logits[1020:1030] = 3.0  # on both sides of a block's end
    for limits, kept in (({"top_p": 0.3}, 3), ({"top_k": 4}, 4), ({"top_k": 6, "top_p": 0.5}, 3)):
        cases = [Case(logits, SamplingParams(**limits), seed=seed) for seed in range(8)]
        assert set(expect_the_reference(cases)) <= set(range(1020, 1020 + kept))


def test_greedy_and_sampled_rows_together() -> None:
    rng = Random(5)
    cases = [random_case(rng, 1500) for _ in range(12)]
    for index, case in enumerate(cases[::2]):
        cases[2 * index] = replace(case, params=SamplingParams(temperature=0.0, logit_bias={3: 100.0, 1499: -100.0}))
    for case, token in zip(cases, draw(DeviceSampler(), cases), strict=True):
        case.expect(token)


def test_penalties_and_bias_as_large_as_they_may_be() -> None:
    params = SamplingParams(
        repetition_penalty=50.0,
        presence_penalty=2.0,
        frequency_penalty=-2.0,
        logit_bias={**dict.fromkeys(range(0, 1500, 3), -100.0), 7: 100.0, 0: 0.0},
        top_p=0.95,
    )
    case = Case(logits_of(1500), params, prompt=(1, 2, 7), output=(4, 4, 7, 1499), drafts=(7, 4))
    expect_the_reference([replace(case, seed=seed, drafts=case.drafts[: seed % 3]) for seed in range(6)])


def test_ids_that_the_tokenizer_does_not_know_are_never_drawn() -> None:
    logits = logits_of(1500, scale=0.1)
    logits[1100:] = 30.0
    params = [SamplingParams(**p) for p in ({}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 0.0})]
    cases = [Case(logits, p, seed=seed) for seed, p in enumerate(params)]
    assert max(expect_the_reference(cases, num_valid=1100)) < 1100


def test_masks_of_logits_processors() -> None:
    """-inf, and the numbers that some use in its place."""
    for masked in (-np.inf, np.finfo(np.float32).min, -1e9):
        logits = logits_of(1500)
        logits[np.arange(1500) % 50 != 3] = masked
        params = [SamplingParams(**p) for p in ({}, {"top_k": 100}, {"top_p": 0.99}, {"min_p": 0.01})]
        drawn = expect_the_reference([Case(logits, p, seed=seed) for seed, p in enumerate(params)])
        assert all(token % 50 == 3 for token in drawn)


@pytest.mark.parametrize("limits", [{"top_k": 5}, {"top_p": 0.9}, {}, {"temperature": 0.0}], ids=str)
@pytest.mark.parametrize("poison", [[np.nan], [np.inf], [-np.inf], [0.0, np.nan, np.inf, -np.inf]], ids=str)
def test_a_row_that_is_not_finite_harms_no_other(limits: dict[str, float], poison: list[float]) -> None:
    params = SamplingParams(**limits)
    good = [Case(logits_of(1500), params, seed=seed) for seed in range(2)]
    bad = Case(np.resize(np.array(poison, dtype=np.float32), 1500), params)
    drawn = draw(DeviceSampler(), [good[0], bad, good[1]])
    assert [drawn[0], drawn[2]] == draw(DeviceSampler(), good)
    assert 0 <= drawn[1] < 1500
    if poison == [-np.inf]:
        assert drawn[1] == 0


def test_equal_logits_give_the_noise_alone() -> None:
    """Seeds of 64 bits, choices and positions, each where a bit may be lost."""
    seeds, choices = (0, 2**32, 2**63, 2**64 - 1), (0, 127)
    flat = Case(np.zeros(1500, dtype=np.float32), SamplingParams())
    expect_the_reference([replace(flat, seed=s, choice=c, prompt=(0,) * (1 + c)) for s in seeds for c in choices])


@triton.jit
def noise_kernel(out, word_ids, seed, position, choice, NUM: tl.constexpr):  # noqa: N803
    lane = tl.arange(0, NUM)
    word = word_of(tl.load(word_ids + lane), tl.load(seed), tl.load(position), tl.load(choice))
    tl.store(out + lane, exact_gumbel(word))
    tl.store(out + NUM + lane, rough_gumbel(word))


@triton.jit
def gumbel_kernel(out, words, NUM: tl.constexpr):  # noqa: N803
    lane = tl.arange(0, NUM)
    word = tl.load(words + lane).to(tl.uint32)
    tl.store(out + lane, exact_gumbel(word))
    tl.store(out + NUM + lane, rough_gumbel(word))


def test_noise_is_the_references() -> None:
    """To the last bit but one of float32; the rough one within half of what is allowed for it."""
    one = torch.tensor([2**40 + 5, 2**31 + 7, 3], device=DEVICE)
    out = torch.empty(2, 4096, device=DEVICE)
    noise_kernel[1,](out, torch.arange(4096, dtype=torch.int32, device=DEVICE), one[:1], one[1:2], one[2:], NUM=4096)
    expected = gumbel(*(part.cpu() for part in one.split(1)), vocab_size=4096)[0]
    torch.testing.assert_close(out[0].cpu(), expected, rtol=2e-7, atol=0)
    torch.testing.assert_close(out[1], out[0], rtol=0, atol=SCORE_ERROR.value / 2)


def test_rough_noise_at_its_edges() -> None:
    shares = np.array([0.0, 2.0**-32, 0.5, 0.97, 0.98, 0.98 + 1e-7, 0.999])
    words = np.resize(np.concatenate([shares * 2**32, 2**32 - 2.0 ** np.arange(32)]).astype(np.int64), 1024)
    words[512:] = np.random.default_rng(0).integers(0, 2**32, 512)
    out = torch.empty(2, 1024, device=DEVICE)
    gumbel_kernel[1,](out, torch.from_numpy(words).to(DEVICE), NUM=1024)
    torch.testing.assert_close(out[1], out[0], rtol=0, atol=SCORE_ERROR.value / 2)


# -- a large model's vocabulary ----------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="hours in the interpreter")
@pytest.mark.parametrize("rows", [1, 63, 256])
def test_tokens_are_the_definitions_at_full_width(rows: int) -> None:
    rng = Random(rows)
    cases = [random_case(rng, FULL_WIDTH) for _ in range(rows)]
    for index, case in enumerate(cases):
        if index % 2:  # as a model in bfloat16 gives them
            rounded = torch.from_numpy(case.logits).bfloat16().float().numpy()
            cases[index] = replace(case, logits=rounded)
    for case, token in zip(cases, draw(DeviceSampler(), cases), strict=True):
        case.expect(token)


@pytest.mark.skipif(INTERPRETED, reason="there is no device to wait for")
def test_the_host_never_waits() -> None:
    params = SamplingParams(
        top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.5, logit_bias={1: 3.0}
    )
    cases = [Case(logits_of(5000), params, seed=seed, drafts=(1, 2)) for seed in range(4)]
    state, mine = state_of(cases, DEVICE, num_valid=4990), DeviceSampler()
    logits = torch.from_numpy(np.stack([case.logits for case in cases])).to(DEVICE)
    rows = SamplingRows(
        slots=torch.arange(4, device=DEVICE),
        positions=torch.full((4,), 3, device=DEVICE),
        drafts_before=torch.tensor([[1, 2]] * 4, device=DEVICE),
        slots_host=[0, 1, 2, 3],
        draft_index_host=[2] * 4,
    )
    for mode in ("default", "error"):  # the first time compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            mine.sample(logits.clone(), rows, state)
            mine.greedy(logits.clone(), state.invalid_token_ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")
