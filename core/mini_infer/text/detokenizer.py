"""Token ids in, text out, one token at a time.

Contract, for every sequence of ids and every tokenizer with a byte-level or sentencepiece decoder:

- the deltas joined, with the flush at the end, are exactly what the one-shot decode of all ids gives;
- no delta holds a part of a character, unless the text itself is broken there, which is then U+FFFD as in the
  one-shot decode;
- a token costs time in proportion to its own length, and at most ``MAX_HELD_BYTES`` bytes are ever held back.

Byte-level text holds back at most three bytes. Sentencepiece's byte fallback judges a whole run of byte tokens at
once (one bad byte makes U+FFFD of each byte of the run), so a run is held until it ends, is known to be bad, or has
reached the bound; only a run that turns bad after the bound differs from the one-shot decode.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.text.token_bytes import TokenBytes

MAX_HELD_BYTES = 64
"""A run of byte-fallback tokens longer than this is no longer held back as a whole."""

MAX_HELD_TOKENS = 16
"""How many tokens ``WindowDetokenizer`` holds back before it gives them out as they are."""

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one sequence of tokens; one object a choice."""

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that became certain, often "" and never a half character."""
        ...

    def flush(self) -> str:
        """End the text; return what was held back, as the one-shot decode writes it. Call once, at the end."""
        ...


def make_detokenizer(
    token_bytes: TokenBytes, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
) -> Detokenizer:
    """A detokeniser for one choice.

    Args:
        token_bytes: the tokenizer's table, shared by all requests.
        skip_special_tokens: special tokens give no text and do not part the bytes on either side of them.
        prompt_token_ids: what the text continues. Sentencepiece drops a space at the start of a text: with a prompt
            the output's first space is kept ("prompt + text" reads right), without one it is dropped, as in a
            one-shot decode of the output alone.
    """
    skipped = token_bytes.special_ids if skip_special_tokens else frozenset()
    if token_bytes.rules.kind == "byte-level":
        return ByteLevelDetokenizer(token_bytes, skipped)
    prompt = [token_id for token_id in prompt_token_ids[-MAX_HELD_TOKENS:] if token_id not in skipped]
    if token_bytes.rules.kind == "byte-fallback":
        return ByteFallbackDetokenizer(token_bytes, skipped, at_start=not prompt)
    return WindowDetokenizer(token_bytes, skipped, prompt)


class ByteLevelDetokenizer:
    """Byte-level BPE: the tokens' bytes joined are the text in UTF-8."""

    def __init__(self, token_bytes: TokenBytes, skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        # Both this decoder and the tokenizer's write one U+FFFD for each maximal part of a broken character
        # (Unicode 15, §3.9, "Substitution of Maximal Subparts").
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._utf8.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class ByteFallbackDetokenizer:
    """Sentencepiece: tokens are text, but for runs of byte tokens, each judged as a whole."""

    def __init__(self, token_bytes: TokenBytes, skipped: frozenset[int], *, at_start: bool) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._strip = token_bytes.rules.strip
        self._to_strip = token_bytes.rules.strip_count if at_start else 0
        self._run = _ByteRun()

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece, is_byte = self._token_bytes.piece(token_id)
        if is_byte:
            return self._stripped(self._run.push(piece))
        if not piece and self._token_bytes.tokenizer.id_to_token(token_id) is None:
            return ""  # no token at all: the run goes on
        return self._stripped(self._run.end() + piece.decode())

    def flush(self) -> str:
        return self._stripped(self._run.end())

    def _stripped(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != self._strip:
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text


class _ByteRun:
    """A run of byte tokens: all of it UTF-8, or U+FFFD for each byte."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self._text = ""  # the whole characters that are held back
        self._num_bytes = 0  # held back, those of a half character included
        self._bad = False

    def push(self, byte: bytes) -> str:
        if self._bad:
            return _REPLACEMENT
        self._num_bytes += 1
        try:
            char = self._utf8.decode(byte)
        except UnicodeDecodeError:
            return self._go_bad()
        self._text += char
        if char and self._num_bytes > MAX_HELD_BYTES - 4:  # the next character may need four
            text, self._text, self._num_bytes = self._text, "", 0
            return text
        return ""

    def end(self) -> str:
        """What the run still owes, now that another token or the end of the text follows it."""
        if not self._num_bytes and not self._bad:
            return ""
        half, _ = self._utf8.getstate()
        text = self._go_bad() if half else self._text
        self._text, self._num_bytes, self._bad = "", 0, False
        self._utf8.reset()
        return text

    def _go_bad(self) -> str:
        text, self._text, self._num_bytes, self._bad = _REPLACEMENT * self._num_bytes, "", 0, True
        return text


class WindowDetokenizer:
    """Any other decoder: decodes a window of tokens before and after, and gives out the difference.

    Exact for decoders whose text for a token depends on the tokens right before it (WordPiece, Metaspace, BPE with
    suffixes); a decoder that looks further is asked about ``MAX_HELD_TOKENS`` tokens, no more.
    """

    def __init__(self, token_bytes: TokenBytes, skipped: frozenset[int], prompt: Sequence[int]) -> None:
        self._tokenizer = token_bytes.tokenizer
        self._skipped = skipped
        self._given = list(prompt)  # context: tokens whose text is out already
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._held.append(token_id)
        before, after = self._decode(self._given), self._decode(self._given + self._held)
        if len(self._held) < MAX_HELD_TOKENS and (after.endswith(_REPLACEMENT) or len(after) <= len(before)):
            return ""
        return self._give(before, after)

    def flush(self) -> str:
        return self._give(self._decode(self._given), self._decode(self._given + self._held))

    def _give(self, before: str, after: str) -> str:
        self._given, self._held = (self._given + self._held)[-MAX_HELD_TOKENS // 2 :], []
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
