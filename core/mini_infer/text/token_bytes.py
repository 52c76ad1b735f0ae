"""What each token id stands for: its bytes, and how a tokenizer's decoder joins them to text.

Contract: ``DecoderRules`` are read once from the ``tokenizers`` decoder, and say the same as it does. Three kinds
exist: byte-level BPE (GPT-2, Llama 3, Qwen), sentencepiece with byte fallback (Llama 2, Gemma, Mistral 7B), and all
others, for which only the decoder itself knows.

Source: the decoders of https://github.com/huggingface/tokenizers, whose output the tests compare byte for byte.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """How a tokenizer joins tokens to text.

    Attributes:
        kind: ``byte-level``, ``byte-fallback`` or ``other``.
        replacements: (from, to) pairs done in each token's text; ``byte-fallback`` only.
        strip: the character that is taken from the start of the whole text; ``byte-fallback`` only.
        strip_count: how many of them at most.
    """

    kind: Literal["byte-level", "byte-fallback", "other"]
    replacements: tuple[tuple[str, str], ...] = ()
    strip: str = ""
    strip_count: int = 0


def decoder_rules(tokenizer: Tokenizer) -> DecoderRules:
    """Read the rules of a tokenizer's decoder; anything that is not wholly understood is ``other``."""
    decoder = tokenizer.decoder
    if decoder is None:
        return DecoderRules("other")
    spec: dict[str, Any] = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return DecoderRules("byte-level")
    return _byte_fallback_rules(steps) or DecoderRules("other")


def _byte_fallback_rules(steps: list[dict[str, Any]]) -> DecoderRules | None:
    """Understand ``Replace* ByteFallback [Fuse [Strip]]``; None for any other sequence."""
    replacements: list[tuple[str, str]] = []
    rest = list(steps)
    while rest and rest[0]["type"] == "Replace":
        step = rest.pop(0)
        if "String" not in step["pattern"]:
            return None
        replacements.append((step["pattern"]["String"], step["content"]))
    kinds = [step["type"] for step in rest]
    if kinds not in (["ByteFallback"], ["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
        return None
    if kinds[-1] != "Strip":
        return DecoderRules("byte-fallback", tuple(replacements))
    if rest[-1]["stop"] != 0:
        return None
    return DecoderRules("byte-fallback", tuple(replacements), rest[-1]["content"], rest[-1]["start"])


def byte_level_alphabet() -> dict[str, int]:
    """The 256 printable characters by which byte-level BPE spells bytes (GPT-2, ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class TokenBytes:
    """The bytes of each token of one tokenizer, computed when first asked for and kept.

    ``tokenizer`` is the Rust tokenizer and must not change afterwards. Safe to share between requests and threads:
    the only writes are of values that depend on the key alone.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.rules = decoder_rules(tokenizer)
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._alphabet = byte_level_alphabet() if self.rules.kind == "byte-level" else {}
        self._cache: dict[int, tuple[bytes, bool]] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of one token, alone: b"" for an id that has no token. For sentencepiece, ``▁hi`` is b" hi"."""
        return self.piece(token_id)[0]

    def piece(self, token_id: int) -> tuple[bytes, bool]:
        """A token's bytes, and whether it is one byte of sentencepiece's byte fallback."""
        known = self._cache.get(token_id)
        if known is None:
            known = self._cache[token_id] = self._compute(token_id)
        return known

    def _compute(self, token_id: int) -> tuple[bytes, bool]:
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b"", False
        if self.rules.kind == "byte-level":
            spelled = [self._alphabet.get(char) for char in token]
            if None in spelled:  # an added token, written as itself
                return token.encode(), False
            return bytes(byte for byte in spelled if byte is not None), False
        if self.rules.kind == "byte-fallback":
            for old, new in self.rules.replacements:
                token = token.replace(old, new)
            if match := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(match[1], 16)]), True
            return token.encode(), False
        return self.tokenizer.decode([token_id], skip_special_tokens=False).encode(), False
