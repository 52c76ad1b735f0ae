"""Stop strings against a plain search over the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.text.stop import StopMatcher


def run(stops: list[str], parts: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include_stop_str_in_output=include)
    given_out = [matcher.push(part) for part in parts]
    return [*given_out, matcher.flush()], matcher.matched


def reference(stops: list[str], text: str, *, include: bool) -> tuple[str, str | None]:
    """The first end of any stop string; the longest that ends there."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


few_letters = st.text("ab", max_size=12)


@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.lists(few_letters, max_size=6), st.booleans())
def test_any_cutting_gives_the_same_text(stops: list[str], parts: list[str], include: bool) -> None:
    given_out, matched = run(stops, parts, include=include)
    assert ("".join(given_out), matched) == reference(stops, "".join(parts), include=include)


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), few_letters)
def test_exactly_what_may_become_a_stop_string_is_held(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    given_out = ""
    for end, char in enumerate(text, start=1):
        given_out += matcher.push(char)
        if matcher.matched is not None:
            return
        may_stop = [n for stop in stops for n in range(1, len(stop)) if text[:end].endswith(stop[:n])]
        assert len(given_out) == end - max(may_stop, default=0)


def test_no_part_of_a_stop_string_is_given_out() -> None:
    given_out, matched = run(["klmnop"], ["go ", "kl", "mn", "op", "zz"])
    assert given_out == ["go ", "", "", "", "", ""]
    assert matched == "klmnop"


def test_held_text_is_released_when_it_cannot_be_a_stop_string() -> None:
    given_out, matched = run(["klmnop"], ["go ", "kl", "mn", "xx"])
    assert given_out == ["go ", "", "", "klmnxx", ""]
    assert matched is None


def test_held_text_is_flushed_at_the_length_limit() -> None:
    assert run(["klmnop"], ["go ", "kl", "mn"]) == (["go ", "", "", "klmn"], None)


def test_the_earliest_match_wins() -> None:
    for stops in (["mnop", "mn"], ["mn", "mnop"]):
        assert run(stops, ["go ", "kl", "mn", "op"]) == (["go ", "kl", "", "", ""], "mn")
    assert run(["b", "abc"], ["xabc"]) == (["xa", ""], "b")
    assert run(["bc", "abc"], ["xabc"]) == (["x", ""], "abc"), "of two that end together, the longest"


def test_the_stop_string_can_be_kept() -> None:
    assert run(["lm"], ["kl", "mn"], include=True) == (["k", "lm", ""], "lm")


def test_a_stop_string_of_one_character() -> None:
    assert run(["😀"], ["go", "😀", "on"]) == (["go", "", "", ""], "😀")


def test_without_stop_strings_text_passes_through() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


def test_after_a_match_nothing_comes() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == "a"
    assert (matcher.push("c"), matcher.flush()) == ("", "")


def test_a_long_stop_string_costs_no_more() -> None:
    given_out, matched = run(["a" * 10_000 + "b"], ["a"] * 20_000 + ["c"])
    assert matched is None
    assert len("".join(given_out)) == 20_001
    assert max(map(len, given_out)) == 10_001


def test_an_empty_stop_string_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])
