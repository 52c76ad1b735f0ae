"""The sampler against the definitions, row by row, in any batch and order, and at the edges of every limit."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.core.sampling_cases import Case, rows_of, sample

from mini_infer.interfaces.sampler import SamplingRows
from mini_infer.sampling import sampler
from mini_infer.sampling.sampler import ReferenceSampler
from mini_infer.sampling.state import SamplingState
from mini_infer.sampling.truncation import truncate
from mini_infer.sampling_params import SamplingParams
from mini_infer.testing.reference_sampler import allowed_tokens, margin

VOCAB_SIZE = 40

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-7, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, VOCAB_SIZE, 10**6]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, -1.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, -1.0, 2.5]), max_size=4),
)
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    logits = rng.normal(scale=draw(st.sampled_from([0.0, 0.5, 3.0])), size=VOCAB_SIZE)
    if draw(st.booleans()):  # many ties
        logits = np.round(logits * 2) / 2
    return Case(
        logits=logits.astype(np.float32),
        params=draw(PARAMS),
        prompt=draw(TOKENS),
        output=draw(st.just([]) | TOKENS),
        drafts=draw(st.just([]) | TOKENS),
        seed=draw(st.integers(0, 2**64 - 1)),
        choice=draw(st.integers(0, 3)),
    )


def one_thousand_from(case: Case) -> list[int]:
    """Tokens of the same case at a thousand positions, in one batch: only the noise differs."""
    state = SamplingState(1, len(case.logits), "cpu")
    state.add(case.new_row(0))
    rows = SamplingRows(torch.zeros(1000, dtype=torch.int64), torch.arange(1000), None, [0] * 1000, [0] * 1000)
    logits = torch.from_numpy(case.logits.astype(np.float32)).repeat(1000, 1)
    return ReferenceSampler().sample(logits, rows, state).tolist()


@given(batch=st.lists(cases(), min_size=1, max_size=6), valid=st.sampled_from([None, 33]))
def test_every_row_draws_what_the_definition_says(batch: list[Case], valid: int | None) -> None:
    assert sample(batch, valid_vocab=valid) == [case.expected(valid) for case in batch]


@given(batch=st.lists(cases(), min_size=2, max_size=6), data=st.data())
def test_neither_batch_nor_order_nor_slot_matter(batch: list[Case], data: st.DataObject) -> None:
    together = sample(batch)
    assert [sample([case])[0] for case in batch] == together
    order = data.draw(st.permutations(range(len(batch))))
    slots = data.draw(st.permutations(range(len(batch))))
    state = SamplingState(len(batch), VOCAB_SIZE, "cpu")
    assert sample([batch[i] for i in order], list(slots), state) == [together[i] for i in order]


@given(before=cases(), case=cases())
def test_a_reused_slot_draws_as_a_new_one(before: Case, case: Case) -> None:
    state = SamplingState(1, VOCAB_SIZE, "cpu")
    sample([before], [0], state)
    state.remove(0)
    assert sample([case], [0], state) == sample([case])


@given(case=cases())
def test_drafts_before_a_position_count_as_output(case: Case) -> None:
    as_output = replace(case, output=case.output + case.drafts, drafts=[])
    other = replace(case, drafts=[])  # a row without drafts beside it, as in a step that verifies
    assert sample([case, other])[0] == sample([as_output])[0]


@given(case=cases())
def test_equal_logits_give_equal_choices_only_at_temperature_0(case: Case) -> None:
    greedy = replace(case, params=replace_params(case.params, temperature=0.0))
    assert len({sample([replace(greedy, choice=c)])[0] for c in range(3)}) == 1


def replace_params(params: SamplingParams, **changes: object) -> SamplingParams:
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**{**fields, **changes})


# -- edges of limits ---------------------------------------------------------------------------------------------------

LOGITS = np.random.default_rng(1).normal(scale=2.0, size=VOCAB_SIZE).astype(np.float32)
BEST = int(LOGITS.argmax())


@pytest.mark.parametrize(
    "limits",
    [
        {"top_p": 0.0},
        {"top_k": 1},
        {"min_p": 1.0},
        {"temperature": 0.0},
        {"temperature": 1e-7},
        {"temperature": 1e-300},
    ],
    ids=str,
)
def test_limits_that_leave_the_most_likely_token(limits: dict[str, float]) -> None:
    assert set(one_thousand_from(Case(LOGITS, SamplingParams(**limits)))) == {BEST}


@pytest.mark.parametrize(
    "limits", [{"top_p": 1.0}, {"top_k": -1}, {"top_k": 0}, {"top_k": 10**6}, {"min_p": 0.0}], ids=str
)
def test_limits_that_are_off(limits: dict[str, float]) -> None:
    assert one_thousand_from(Case(LOGITS, SamplingParams(**limits))) == one_thousand_from(
        Case(LOGITS, SamplingParams())
    )


def test_min_p_1_keeps_ties_with_the_maximum_only() -> None:
    tied = LOGITS.copy()
    tied[[3, 8]] = LOGITS.max()
    tied[9] = np.nextafter(LOGITS.max(), np.float32(-100))
    assert set(one_thousand_from(Case(tied, SamplingParams(min_p=1.0)))) == {3, 8, BEST}


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"top_p": 0.3}, 3),
        ({"top_p": 0.31}, 4),
        ({"top_p": 0.7}, 7),
        ({"top_k": 4}, 4),
        ({"top_k": 4, "top_p": 0.5}, 2),
    ],
    ids=str,
)
def test_ties_at_the_boundary_go_to_the_lower_ids(limits: dict[str, float], kept: int) -> None:
    ten_equal = np.full(VOCAB_SIZE, -50.0, dtype=np.float32)
    ten_equal[5:15] = 3.0
    assert set(one_thousand_from(Case(ten_equal, SamplingParams(**limits)))) == set(range(5, 5 + kept))


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-45, 1e-320])
def test_ties_of_the_final_score(temperature: float) -> None:
    """At T = 0 the lowest id wins; at any T above, noise decides between equal logits."""
    drawn = set(
        one_thousand_from(Case(np.zeros(VOCAB_SIZE, dtype=np.float32), SamplingParams(temperature=temperature)))
    )
    assert drawn == ({0} if temperature == 0.0 else set(range(VOCAB_SIZE)))


@pytest.mark.parametrize("temperature", [1e-7, 1.0, 2.0, 1e6])
@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_large_logits_do_not_overflow(temperature: float, limits: dict[str, float]) -> None:
    logits = np.array([3e38, -3e38, 0.0, 2.9e38, -np.inf], dtype=np.float32)
    params = SamplingParams(temperature=temperature, **limits)
    batch = [Case(logits, params, seed=seed) for seed in range(20)]
    assert sample(batch) == [case.expected() for case in batch] == [0] * 20


def test_equal_probabilities_reach_a_share_that_rounding_misses() -> None:
    """0.28 * 25 is above 7 in float64."""
    equal = np.zeros(25, dtype=np.float32)
    assert set(one_thousand_from(Case(equal, SamplingParams(top_p=0.28)))) == set(range(7))


def test_equal_scores_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that makes up for what a token is less likely: the scores are equal."""
    logits = np.array([1.0, 2.0, 3.0, -50.0], dtype=np.float32)
    noise = torch.tensor([[2.0, 1.0, 0.0, -50.0]])

    def gumbel(*_: torch.Tensor, token_ids: torch.Tensor | None = None, vocab_size: int = 4) -> torch.Tensor:
        return noise if token_ids is None else noise[0, token_ids]

    monkeypatch.setattr(sampler, "gumbel", gumbel)
    for limits in ({"top_k": 3}, {"top_p": 0.999}, {}):
        assert sample([Case(logits, SamplingParams(**limits))]) == [0]


@pytest.mark.parametrize("limits", [{"top_k": 5}, {"top_p": 0.9}, {}, {"temperature": 0.0}], ids=str)
@pytest.mark.parametrize("poison", [[math.nan], [math.inf], [-math.inf], [math.nan, math.inf, -math.inf]], ids=str)
@pytest.mark.parametrize("large_vocab", [1, VOCAB_SIZE + 1])
def test_a_row_that_is_not_finite_harms_no_other(
    limits: dict[str, float], poison: list[float], large_vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "_LARGE_VOCAB", large_vocab)
    params = SamplingParams(**limits)
    good = [Case(LOGITS, params, seed=seed) for seed in range(2)]
    bad = Case(np.resize(np.array(poison, dtype=np.float32), VOCAB_SIZE), params)
    drawn = sample([good[0], bad, good[1]])
    assert [drawn[0], drawn[2]] == sample(good)
    assert 0 <= drawn[1] < VOCAB_SIZE
    if poison == [-math.inf]:
        assert drawn[1] == 0


def test_ids_that_the_tokenizer_does_not_know_are_never_drawn() -> None:
    logits = np.zeros(384, dtype=np.float32)
    logits[320:] = 30.0
    batch = [Case(logits, SamplingParams(temperature=t), seed=s) for t in (0.0, 1.0, 2.0) for s in range(30)]
    assert max(sample(batch, valid_vocab=320)) < 320
    holes = SamplingState(1, 384, "cpu", 320, [0, 1])
    assert sample([Case(logits, SamplingParams(temperature=0.0))], [0], holes) == [2]


def test_bias_that_leaves_one_token() -> None:
    bias = {token: -100.0 for token in range(320) if token != 77}
    logits = np.random.default_rng(0).normal(size=384).astype(np.float32)
    batch = [
        Case(logits, SamplingParams(temperature=t, logit_bias=bias), seed=s) for t in (0.0, 1.0, 2.0) for s in (1, 2)
    ]
    assert set(sample(batch, valid_vocab=320)) == {77}


# -- wide vocabularies: the ways of drawing ----------------------------------------------------------------------------

WIDE = 3000
WAYS = [
    {},
    {"min_p": 0.02},
    {"top_k": 50},
    {"top_k": 1500},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"top_k": 1500, "top_p": 0.8},
]


def wide_batch() -> list[Case]:
    rng = np.random.default_rng(7)
    scales = (0.3, 2.0, 8.0)  # flat, as a model's, nearly certain
    return [
        Case(rng.normal(scale=scale, size=WIDE).astype(np.float32), SamplingParams(**way), seed=seed)
        for seed, (way, scale) in enumerate(itertools.product(WAYS, scales))
    ]


@pytest.mark.parametrize("large_vocab", [1, WIDE + 1])
@pytest.mark.parametrize("num_candidates", [16, 1024, WIDE])
def test_all_ways_of_drawing_in_one_batch(
    large_vocab: int, num_candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short cuts of a CPU, taken early, late or never, change nothing."""
    monkeypatch.setattr(sampler, "_LARGE_VOCAB", large_vocab)
    monkeypatch.setattr(sampler, "_NUM_CANDIDATES", num_candidates)
    batch = wide_batch()
    expected = [case.expected() for case in batch]
    assert sample(batch) == expected
    assert [sample([case])[0] for case in batch] == expected


@pytest.mark.gpu
def test_a_gpu_draws_the_same() -> None:
    batch = wide_batch()
    state = SamplingState(len(batch), WIDE, "cuda")
    assert sample(batch, state=state) == [case.expected() for case in batch]


@given(seed=st.integers(0, 10**6), top_p=st.sampled_from([0.0, 0.2, 0.9, 1.0]), top_k=st.sampled_from([0, 1, 9, 30]))
def test_truncation_keeps_the_same_tokens_however_many_candidates(seed: int, top_p: float, top_k: int) -> None:
    rng = np.random.default_rng(seed)
    scaled = np.round(rng.normal(scale=2.0, size=64) * 4) / 4
    scaled -= scaled.max()
    wanted, _ = allowed_tokens(scaled, SamplingParams(top_p=top_p, top_k=top_k))
    for num_candidates in (30, 40, 64):
        ids, values, complete = truncate(
            torch.from_numpy(scaled).float()[None],
            torch.tensor([top_k or 64]),
            torch.tensor([top_p], dtype=torch.float64),
            torch.zeros(1),
            num_candidates=num_candidates,
        )
        kept = set(ids[values.isfinite()].tolist())
        if complete.item():
            assert kept == set(wanted.nonzero()[0].tolist())
        else:
            assert num_candidates < max(top_k or 64, wanted.sum())
    assert complete.item()


def test_top_p_1_drops_nothing_however_unlikely() -> None:
    one = torch.ones(1, dtype=torch.float64)
    _, values, _ = truncate(torch.tensor([[0.0, -90.0]]), torch.tensor([2]), one, torch.zeros(1), num_candidates=2)
    assert values.tolist() == [[0.0, -90.0]]


# -- the distribution --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_draws_follow_the_distribution(limits: dict[str, float]) -> None:
    """Chi-square of 4,000 draws with fixed seeds, p > 0.001."""
    params = SamplingParams(**limits)
    logits = np.random.default_rng(3).normal(scale=0.7, size=12).astype(np.float32)
    drawn = [t for s in range(4) for t in one_thousand_from(Case(logits, params, seed=s))]
    scaled = (logits.astype(np.float64) - logits.max()) / params.temperature
    weights = np.where(allowed_tokens(scaled, params)[0], np.exp(scaled), 0.0)
    expected = 4000 * weights / weights.sum()
    counts = np.bincount(drawn, minlength=12)
    assert not counts[expected == 0].any()
    some = expected > 0
    statistic = ((counts - expected)[some] ** 2 / expected[some]).sum()
    freedom = torch.tensor((some.sum() - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)) > 0.001


def test_choices_and_positions_are_independent_streams() -> None:
    flat = Case(np.zeros(1000, dtype=np.float32), SamplingParams())
    streams = [one_thousand_from(replace(flat, choice=choice)) for choice in range(3)]
    for one, other in itertools.combinations(streams, 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 10


# -- the interface -----------------------------------------------------------------------------------------------------


def test_padding_rows_are_greedy() -> None:
    case = Case(LOGITS, SamplingParams(repetition_penalty=2.0), prompt=[BEST], seed=4)
    state = SamplingState(1, VOCAB_SIZE, "cpu")
    rows = rows_of([case, case], [0, state.padding_slot])
    state.add(case.new_row(0))
    drawn = ReferenceSampler().sample(torch.from_numpy(LOGITS).repeat(2, 1), rows, state)
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == [case.expected(), BEST]


def test_margin_is_in_the_logits_unit() -> None:
    logits = np.array([1.0, 4.0, 3.5, -2.0], dtype=np.float32)
    greedy = SamplingParams(temperature=0.0)
    assert margin(logits, [0], 1, greedy, 0, 1) == pytest.approx(0.5)
    assert margin(logits, [0], 1, greedy, 0, 1, other=0) == pytest.approx(3.0)
    assert margin(logits, [0], 1, SamplingParams(temperature=1e-7), 0, 1) == pytest.approx(0.5, abs=1e-5)
    assert margin(logits, [0], 1, SamplingParams(top_k=1), 0, 1) == pytest.approx(0.5)  # the set was decided by that
