"""The incremental detokeniser against the tokenizer's own one-shot decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from mini_infer.testing.tokenizers import byte_tokenizer, sentencepiece_tokenizer
from mini_infer.text.detokenizer import (
    MAX_HELD_BYTES,
    MAX_HELD_TOKENS,
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    WindowDetokenizer,
    make_detokenizer,
)
from mini_infer.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from collections.abc import Sequence

T1 = TokenBytes(byte_tokenizer().backend)
T2 = TokenBytes(sentencepiece_tokenizer().backend)
BYTE0 = {T1: 0, T2: 3}  # the id of byte 0
EMOJI = "😀".encode()
CJK = "你".encode()
# Bytes that meet each rule of UTF-8: ASCII, continuation, overlong, surrogate, lead of 2, 3 and 4, never valid.
TRICKY = [0x20, 0x41, 0x80, 0x8F, 0x9F, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xE4, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF]


def ids_of(table: TokenBytes, *parts: bytes | str) -> list[int]:
    """Bytes as byte tokens, strings as one token each."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, bytes):
            ids += [BYTE0[table] + byte for byte in part]
        else:
            token_id = table.tokenizer.token_to_id(part)
            assert token_id is not None, f"no token {part!r}"
            ids.append(token_id)
    return ids


def deltas(table: TokenBytes, ids: Sequence[int], **options: object) -> list[str]:
    detokenizer = make_detokenizer(table, **options)  # type: ignore[arg-type]
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def one_shot(table: TokenBytes, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    return table.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def any_ids(table: TokenBytes) -> st.SearchStrategy[list[int]]:
    """Mostly bytes that break UTF-8, some whole emoji, some other tokens, some ids without a token."""
    tricky = st.sampled_from([BYTE0[table] + byte for byte in TRICKY]).map(lambda token_id: [token_id])
    whole = st.sampled_from([EMOJI, CJK, "é".encode()]).map(lambda text: ids_of(table, text))
    other = st.integers(0, 330).map(lambda token_id: [token_id])
    return st.lists(st.one_of(tricky, tricky, whole, other), max_size=40).map(
        lambda parts: [token_id for part in parts for token_id in part]
    )


@pytest.mark.parametrize("table", [T1, T2], ids=["byte-level", "sentencepiece"])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_joined_deltas_are_the_one_shot_decode(table: TokenBytes, skip_special_tokens: bool) -> None:
    @given(any_ids(table))
    def check(ids: list[int]) -> None:
        joined = "".join(deltas(table, ids, skip_special_tokens=skip_special_tokens))
        assert joined == one_shot(table, ids, skip_special_tokens=skip_special_tokens)

    check()


@given(st.text())
def test_text_comes_back_whole_and_never_by_halves(text: str) -> None:
    for table in (T1, T2):
        ids = table.tokenizer.encode(text).ids
        parts = deltas(table, ids)
        assert "".join(parts) == one_shot(table, ids)
        assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


def test_an_emoji_comes_as_one_delta() -> None:
    assert deltas(T1, ids_of(T1, EMOJI, "ok")) == ["", "", "", "😀", "ok", ""]
    assert deltas(T2, ids_of(T2, EMOJI, "o", "k")) == ["", "", "", "", "😀o", "k", ""]
    assert deltas(T2, ids_of(T2, EMOJI))[-1] == "😀", "flushed at the end of the text"


@pytest.mark.parametrize("table", [T1, T2], ids=["byte-level", "sentencepiece"])
@pytest.mark.parametrize(
    "broken",
    [
        CJK[:2] + b"a",
        b"\x80",
        b"\xf0\x9f",
        EMOJI[:3] + EMOJI,
        CJK + b"\xff",
        b"\xed\xa0\x80",
        b"\xc0\xaf",
        b"\xf0" * 50,
    ],
)
def test_broken_characters_are_those_of_the_one_shot_decode(table: TokenBytes, broken: bytes) -> None:
    ids = ids_of(table, broken)
    assert "".join(deltas(table, ids)) == one_shot(table, ids)


@pytest.mark.parametrize("table", [T1, T2], ids=["byte-level", "sentencepiece"])
def test_a_control_token_does_not_part_a_character(table: TokenBytes) -> None:
    control = "<|u|>" if table is T1 else "</s>"
    ids = ids_of(table, EMOJI[:2], control, EMOJI[2:], "k")
    assert "".join(deltas(table, ids)) == "😀k"
    assert control in "".join(deltas(table, ids, skip_special_tokens=False))


@pytest.mark.parametrize("table", [T1, T2], ids=["byte-level", "sentencepiece"])
def test_an_id_without_a_token_does_not_part_a_character(table: TokenBytes) -> None:
    assert "".join(deltas(table, [*ids_of(table, EMOJI[:2]), 350, *ids_of(table, EMOJI[2:])])) == "😀"


def test_two_requests_interleaved_do_not_meet() -> None:
    first, second = make_detokenizer(T1), make_detokenizer(T1)
    out = ["", ""]
    for byte, other in zip(EMOJI, "🙃".encode(), strict=True):
        out[0] += first.push(byte)
        out[1] += second.push(other)
    assert out == ["😀", "🙃"]


def test_lead_bytes_are_not_held_back() -> None:
    assert deltas(T1, ids_of(T1, b"\xf0" * 50))[:-1] == [""] + ["\ufffd"] * 49
    assert deltas(T2, ids_of(T2, b"\xf0" * 50))[:-1] == ["", "\ufffd\ufffd"] + ["\ufffd"] * 48


def test_a_long_run_of_byte_tokens_is_held_back_to_the_bound_only() -> None:
    detokenizer = make_detokenizer(T2)
    given_out = 0
    for number, token_id in enumerate(ids_of(T2, EMOJI * 100), start=1):
        given_out += len(detokenizer.push(token_id).encode())
        assert number - given_out < MAX_HELD_BYTES
    assert given_out + len(detokenizer.flush().encode()) == 400


def test_sentencepiece_keeps_the_space_after_a_prompt() -> None:
    ids = T2.tokenizer.encode("hi the ton", add_special_tokens=False).ids
    cut = 2
    prompt, output = ids[:cut], ids[cut:]
    assert one_shot(T2, prompt) + "".join(deltas(T2, output, prompt_token_ids=prompt)) == "hi the ton"
    assert "".join(deltas(T2, output)) == one_shot(T2, output)
    assert "".join(deltas(T2, ids, prompt_token_ids=ids_of(T2, "<s>"))) == "hi the ton", "BOS alone is no text"


def test_the_right_detokeniser_is_taken() -> None:
    assert isinstance(make_detokenizer(T1), ByteLevelDetokenizer)
    assert isinstance(make_detokenizer(T2), ByteFallbackDetokenizer)
    assert isinstance(make_detokenizer(wordpiece()), WindowDetokenizer)
    assert isinstance(make_detokenizer(metaspace()), WindowDetokenizer)


def wordpiece() -> TokenBytes:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "ball": 3, "##s": 4}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return TokenBytes(tokenizer)


def metaspace() -> TokenBytes:
    tokenizer = Tokenizer(models.WordLevel({"▁play": 0, "ing": 1, "▁ball": 2, "\ufffd": 3}, unk_token="ing"))
    tokenizer.decoder = decoders.Metaspace()
    return TokenBytes(tokenizer)


@pytest.mark.parametrize("table", [wordpiece(), metaspace()], ids=["wordpiece", "metaspace"])
def test_other_decoders_are_asked_about_a_window(table: TokenBytes) -> None:
    @given(st.lists(st.integers(0, 4), max_size=60))
    def check(ids: list[int]) -> None:
        assert "".join(deltas(table, ids)) == one_shot(table, ids)

    check()


def test_a_window_lets_a_replacement_character_go_in_the_end() -> None:
    parts = deltas(metaspace(), [3] * 50)
    assert "".join(parts) == "\ufffd" * 50
    assert len(parts[MAX_HELD_TOKENS - 1]) == MAX_HELD_TOKENS


def test_token_bytes() -> None:
    assert [T1[token_id] for token_id in ids_of(T1, "goĠ", b"\xf0", "<|stop|>")] == [b"go ", b"\xf0", b"<|stop|>"]
    assert [T2[token_id] for token_id in ids_of(T2, "▁h", b"\xe4", "<s>")] == [b" h", b"\xe4", b"<s>"]
    assert T1[350] == T2[350] == b""
    assert wordpiece()[2] == b"##ing"
