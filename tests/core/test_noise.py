"""Noise: the published Philox, the same on every path, and Gumbel distributed."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.sampling import noise
from mini_infer.sampling.noise import NOISE_MAX, as_int64, derive_seed, gumbel, philox4x32, uniform
from mini_infer.testing import reference_sampler

WORDS = st.integers(0, 2**32 - 1)
SEEDS = st.integers(0, 2**64 - 1)

# Random123's kat_vectors (Salmon et al., SC'11): counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def integers(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox_in_python(counter: list[int], key: list[int]) -> list[int]:
    """A third writing of Philox4x32-10, in Python's integers."""
    for i in range(10):
        product0, product1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        key0, key1 = (key[0] + i * 0x9E3779B9) % 2**32, (key[1] + i * 0xBB67AE85) % 2**32
        counter = [
            product1 // 2**32 ^ counter[1] ^ key0,
            product1 % 2**32,
            product0 // 2**32 ^ counter[3] ^ key1,
            product0 % 2**32,
        ]
    return counter


def philox_in_torch(counter: list[int], key: list[int]) -> list[int]:
    x0, x1, x2, x3 = (torch.tensor(word) for word in counter)
    return [int(word) for word in philox4x32((x0, x1, x2, x3), (torch.tensor(key[0]), torch.tensor(key[1])))]


def philox_in_numpy(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = (np.uint64(word) for word in counter)
    words = reference_sampler.philox4x32_10((c0, c1, c2, c3), (np.uint64(key[0]), np.uint64(key[1])))
    return [int(word) for word in words]


@pytest.mark.parametrize("philox", [philox_in_torch, philox_in_numpy, philox_in_python])
@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(philox: object, counter: str, key: str, answer: str) -> None:
    assert callable(philox)
    assert philox(integers(counter), integers(key)) == integers(answer)


@given(counter=st.lists(WORDS, min_size=4, max_size=4), key=st.lists(WORDS, min_size=2, max_size=2))
def test_three_implementations_agree(counter: list[int], key: list[int]) -> None:
    assert philox_in_torch(counter, key) == philox_in_python(counter, key)
    assert philox_in_numpy(counter, key) == philox_in_python(counter, key)


def rows_of(seeds: list[int], positions: list[int], choices: list[int]) -> tuple[torch.Tensor, ...]:
    return torch.tensor([as_int64(s) for s in seeds]), torch.tensor(positions), torch.tensor(choices)


@given(seed=SEEDS, position=WORDS, choice=st.integers(0, 127), token=WORDS)
def test_gumbel_is_the_definition(seed: int, position: int, choice: int, token: int) -> None:
    """Key, counter and transformation as the design page has them, 32-bit extremes included."""
    word = philox_in_python([token, position, choice, 0], [seed % 2**32, seed >> 32])[0]
    u = (word + 0.5) / 2**32
    args = rows_of([seed], [position], [choice])
    assert uniform(args[0], torch.tensor([token]), args[1], args[2]).item() == u
    mine = gumbel(*args, token_ids=torch.tensor([[token]])).item()
    assert mine == pytest.approx(-np.log(-np.log(u)), rel=1e-7, abs=1e-7)
    assert mine == reference_sampler.gumbel(seed, np.array([token]), position, choice)[0]


def test_candidates_blocks_and_batch_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    args = rows_of([3, 2**64 - 1, 0], [0, 7, 2**31], [0, 1, 2])
    full = gumbel(*args, vocab_size=1000)
    ids = torch.stack([torch.randperm(1000, generator=torch.manual_seed(0))[:50] for _ in range(3)])
    assert torch.equal(gumbel(*args, token_ids=ids), full.gather(1, ids))
    assert torch.equal(gumbel(*args, token_ids=ids[:1]), full[:, ids[0]])
    for row in range(3):
        assert torch.equal(gumbel(*(a[row : row + 1] for a in args), vocab_size=1000), full[row : row + 1])
    for block in (30, 300, 2100):
        monkeypatch.setattr(noise, "_CPU_BLOCK", block)
        assert torch.equal(gumbel(*args, vocab_size=1000), full)


def test_each_of_seed_position_choice_and_token_matters() -> None:
    base = gumbel(*rows_of([5], [9], [0]), vocab_size=64)
    for other in ([5 + 2**32], [9], [0]), ([6], [9], [0]), ([5], [10], [0]), ([5], [9], [1]):
        assert (gumbel(*rows_of(*other), vocab_size=64) != base).all()
    assert base.unique().numel() == 64


def test_extreme_words_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.tensor([[0, 1, 2**31, 2**32 - 2, 2**32 - 1]])
    monkeypatch.setattr(noise, "_rounds", lambda *_: (words, words, words, words))
    g = gumbel(*rows_of([0], [0], [0]), vocab_size=5)
    assert g.isfinite().all()
    assert (g.diff() > 0).all()
    assert -3.2 < g.min() < -3.1
    assert NOISE_MAX - 1e-4 < g.max() < NOISE_MAX


def test_no_token_or_no_row() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert gumbel(empty, empty, empty, vocab_size=7).shape == (0, 7)
    assert gumbel(*rows_of([1], [1], [0]), token_ids=torch.zeros(1, 0, dtype=torch.int64)).shape == (1, 0)


def test_moments() -> None:
    g = gumbel(*rows_of([11, 12, 13, 14], [0, 1, 2, 3], [0, 0, 0, 0]), vocab_size=50_000).double()
    assert g.mean().item() == pytest.approx(0.57722, abs=0.01)  # Euler's constant
    assert g.var().item() == pytest.approx(np.pi**2 / 6, abs=0.02)


def test_derive_seed() -> None:
    assert derive_seed(0) == 0
    assert derive_seed(-1) == 2**64 - 1
    assert derive_seed(-(2**63)) == 2**63
    assert derive_seed(2**63 - 1) == 2**63 - 1
    fresh = {derive_seed(None) for _ in range(50)}
    assert len(fresh) == 50
    assert all(0 <= seed < 2**64 for seed in fresh)


@given(seed=st.integers(-(2**63), 2**63 - 1))
def test_a_signed_seed_survives_the_round_trip(seed: int) -> None:
    assert as_int64(derive_seed(seed)) == seed


@pytest.mark.gpu
def test_a_gpu_gives_the_same_noise() -> None:
    args = rows_of([3, 2**64 - 1, 0], [0, 7, 2**31], [0, 1, 2])
    gpu = tuple(a.cuda() for a in args)
    ids = torch.arange(200_000)
    words, gpu_words = (
        uniform(seeds[:, None], ids.to(seeds.device), positions[:, None], choices[:, None]).cpu()
        for seeds, positions, choices in (args, gpu)
    )
    assert torch.equal(words, gpu_words)
    mine, theirs = gumbel(*args, vocab_size=200_000), gumbel(*gpu, vocab_size=200_000).cpu()
    assert torch.allclose(mine, theirs, rtol=2e-7, atol=0)
    assert (mine != theirs).float().mean() < 1e-5
