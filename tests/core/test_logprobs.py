"""Log-probabilities: float64 as the yardstick, ties, ranks, and one number for a token wherever it is named."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.plan import TokenLogprobs
from mini_infer.sampling import logprobs
from mini_infer.sampling.logprobs import token_logprobs


def expected(row: np.ndarray, token: int, num_top: int) -> TokenLogprobs:
    row = row.astype(np.float64)
    values = row - row.max() - math.log(np.exp(row - row.max()).sum())
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:num_top]
    rank = 1 + sum(value > row[token] for value in row)
    return TokenLogprobs(token, values[token], int(rank), [(i, values[i]) for i in order])


def assert_close(mine: TokenLogprobs, right: TokenLogprobs) -> None:
    assert (mine.token_id, mine.rank) == (right.token_id, right.rank)
    assert mine.logprob == pytest.approx(right.logprob, abs=2e-6)
    assert [i for i, _ in mine.top] == [i for i, _ in right.top]
    assert [v for _, v in mine.top] == pytest.approx([v for _, v in right.top], abs=2e-6)


@given(seed=st.integers(0, 10**6), ties=st.booleans(), num_top=st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_against_float64(seed: int, ties: bool, num_top: list[int]) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=3.0, size=(len(num_top), 24)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    tokens = rng.integers(0, 24, size=len(num_top))
    mine = token_logprobs(torch.from_numpy(logits), torch.from_numpy(tokens), num_top)
    for row, token, count, answer in zip(logits, tokens.tolist(), num_top, mine, strict=True):
        assert_close(answer, expected(row, token, count))
        listed = dict(answer.top)
        assert listed.get(token, answer.logprob) == answer.logprob


def test_the_first_of_the_list_is_the_most_likely() -> None:
    (answer,) = token_logprobs(torch.tensor([[0.0, 5.0, 5.0, -1.0]]), torch.tensor([2]), [3])
    assert answer.rank == 1
    assert [token for token, _ in answer.top] == [1, 2, 0]
    assert answer.top[0][1] == answer.top[1][1] == answer.logprob


def test_rows_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 50, generator=torch.manual_seed(0))
    tokens = torch.arange(7)
    together = token_logprobs(logits, tokens, [5] * 7)
    alone = [token_logprobs(logits[i : i + 1], tokens[i : i + 1], [5])[0] for i in range(7)]
    monkeypatch.setattr(logprobs, "_BLOCK", 100)
    assert together == alone == token_logprobs(logits, tokens, [5] * 7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_dtype_and_no_change_to_the_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 30, generator=torch.manual_seed(1)).to(dtype)
    before = logits.clone()
    mine = token_logprobs(logits, torch.tensor([3, 4]), [2, 2])
    assert torch.equal(logits, before)
    assert mine == token_logprobs(logits.float(), torch.tensor([3, 4]), [2, 2])


def test_more_than_there_are_none_and_infinite() -> None:
    logits = torch.tensor([[1.0, -math.inf, 0.0]])
    (answer,) = token_logprobs(logits, torch.tensor([1]), [20])
    assert answer.logprob == -math.inf
    assert answer.rank == 3
    assert [token for token, _ in answer.top] == [0, 2, 1]
    (answer,) = token_logprobs(logits, torch.tensor([0]), [0])
    assert answer.top == []
    assert token_logprobs(logits[:0], torch.tensor([], dtype=torch.int64), []) == []
