"""Sampling parameters as scripts give them: what None means, and values of a wrong kind or out of range."""

from typing import Any

import pytest

from mini_infer.errors import RequestError
from mini_infer.sampling_params import SamplingParams


def test_none_is_nothing_of_it() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("stop", "stop_token_ids", "logit_bias", "extensions"))
    assert SamplingParams(**nothing) == SamplingParams()


def test_one_stop_string_or_several() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1]).stop_strings == ("a", "b")


WRONG = [
    ("stop", 5), ("stop", b"a"), ("stop", [""]), ("stop", [5]), ("stop", ["abcde"] * 5), ("stop_token_ids", 5),
    ("stop_token_ids", "ab"), ("stop_token_ids", [True]), ("stop_token_ids", [-1]), ("logit_bias", 5),
    ("logit_bias", [5]), ("logit_bias", {"5": 1}), ("logit_bias", {5: "x"}), ("logit_bias", {5: float("nan")}),
    ("logit_bias", {5: None}), ("extensions", 5), ("ignore_eos", "yes"), ("skip_special_tokens", None),
    ("include_stop_str_in_output", 1), ("n", "1"), ("n", None), ("seed", 1.5), ("seed", True), ("seed", 2**63),
    ("temperature", None), ("temperature", "1"), ("temperature", float("inf")), ("max_tokens", 1.5),
    ("min_tokens", None), ("logprobs", True), ("logprobs", 21), ("prompt_logprobs", "a"), ("repetition_penalty", 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}={value!r}" for name, value in WRONG])
def test_wrong_values_name_the_parameter(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"^{name} (must|values|takes)") as error:
        SamplingParams(**{name: value})
    assert error.value.param == name
