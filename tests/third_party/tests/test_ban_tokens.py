"""``ban-tokens``: what is banned is not drawn, and nobody else notices."""

from collections.abc import Callable
from typing import Any

import pytest

from mini_infer import LLM, SamplingParams
from mini_infer.errors import RequestError
from mini_infer.testing import assert_same_tokens

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def params(banned: Any = None, **more: Any) -> SamplingParams:
    extensions = {} if banned is None else {"ban-tokens": banned}
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, "extensions": extensions, **more})


def test_a_ban_holds_for_its_request_alone(make_llm: Callable[..., LLM]) -> None:
    plain = make_llm().generate(PROMPTS, params())
    banned = plain[1].outputs[0].token_ids
    llm = make_llm(plugins=["ban-tokens"])
    answers = llm.generate(PROMPTS, [params(), params(banned), params([])])
    assert_same_tokens([answers[0], answers[2]], [plain[0], plain[2]])
    assert not set(banned) & set(answers[1].outputs[0].token_ids)
    assert_same_tokens(llm.generate(PROMPTS, params()), plain)


def test_only_what_is_left_is_drawn(make_llm: Callable[..., LLM]) -> None:
    (answer,) = make_llm(plugins=["ban-tokens"]).generate([[1]], params(list(range(300)), temperature=5.0, seed=3))
    assert min(answer.outputs[0].token_ids) >= 300


def test_ids_beyond_the_vocabulary_are_no_matter(make_llm: Callable[..., LLM]) -> None:
    plain = make_llm().generate(PROMPTS, params())
    assert_same_tokens(make_llm(plugins=["ban-tokens"]).generate(PROMPTS, params([384, 10**6])), plain)


@pytest.mark.parametrize("malformed", ["13", 13, {"13": 1}, [True], [1.0], [-1], ["13"], [[13]]], ids=repr)
def test_a_malformed_ban_is_the_requests_fault(malformed: Any, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(plugins=["ban-tokens"])
    with pytest.raises(RequestError, match="ban-tokens must be a list of token ids, integers >= 0") as caught:
        llm.generate([[1]], params(malformed))
    assert caught.value.param == "ban-tokens"
    assert len(llm.generate([[1]], params([2]))) == 1
