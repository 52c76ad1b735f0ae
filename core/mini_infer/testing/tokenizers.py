"""Two tokenizers of 320 tokens for tests, built in memory: byte-level ("T1") and sentencepiece style ("T2").

Contract: no download; the ids below never change, as recorded outputs depend on them; nothing heavy is imported when
this module is.

- ``byte_tokenizer``: id b < 256 is the byte b, then 61 merges, then ``<|u|>``, ``<|a|>``, ``<|stop|>`` (317 to 319). It
  has no BOS; ``<|stop|>`` is its EOS.
- ``sentencepiece_tokenizer``: ``<unk>``, ``<s>``, ``</s>`` (0 to 2), byte b is id 3 + b, then single characters and
  merges. A text starts with ``<s>`` and a space that decoding takes away again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_infer.text.token_bytes import byte_level_alphabet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


def _pairs(merges: str) -> tuple[tuple[str, str], ...]:
    return tuple((merge[0], merge[1]) for merge in merges.split())


BYTE_MERGES = (
    *_pairs("kl mn op zz xx ok aa go"),
    ("go", "Ġ"),
    *_pairs("th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi"),
    *_pairs("ri ro ic ne ea ra ce li ch ll be ma si om ur Ġt Ġa"),
)
SENTENCEPIECE_CHARACTERS = "▁abcdefghijklmnopqrstuvwxyz0123456789.,!?'-:"
SENTENCEPIECE_MERGES = _pairs("▁t ▁a ▁h ▁s ▁w ▁i ▁o he th in er an re on ll ou ng")
BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|a|>{% else %}<|u|>{% endif %}{{ message.content }}<|stop|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)
SENTENCEPIECE_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ ' ' + message.content + ' ' + eos_token }}"
    "{% else %}{{ '[inst] ' + message.content + ' [/inst]' }}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class BuiltTokenizer:
    """A tokenizer made here.

    Attributes:
        backend: the Rust tokenizer.
        special_tokens: named special tokens, such as ``{"eos_token": "<|stop|>"}``.
        chat_template: Jinja source, or None for a model that cannot chat.
    """

    backend: Tokenizer
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None

    def hf(self) -> PreTrainedTokenizerFast:
        """The same as a tokenizer of transformers, which this imports (seconds)."""
        from transformers import PreTrainedTokenizerFast

        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=self.backend, clean_up_tokenization_spaces=False, **self.special_tokens
        )
        tokenizer.chat_template = self.chat_template
        return tokenizer

    def save(self, folder: str | Path) -> Path:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``, from which ``AutoTokenizer`` loads the same."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
        return folder


def byte_tokenizer(chat_template: str | None = BYTE_CHAT_TEMPLATE) -> BuiltTokenizer:
    """Byte-level BPE, "T1" (see the module's contract for its ids)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = byte_level_alphabet()
    for left, right in BYTE_MERGES:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(BYTE_MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<|u|>", "<|a|>", "<|stop|>")]
    )
    return BuiltTokenizer(backend, {"eos_token": "<|stop|>"}, chat_template)


def sentencepiece_tokenizer(chat_template: str | None = SENTENCEPIECE_CHAT_TEMPLATE) -> BuiltTokenizer:
    """Sentencepiece-style BPE with byte fallback and BOS, "T2" (see the module's contract for its ids)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    control = ("<unk>", "<s>", "</s>")
    tokens = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *SENTENCEPIECE_CHARACTERS]
    tokens += [left + right for left, right in SENTENCEPIECE_MERGES]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=list(SENTENCEPIECE_MERGES), byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return BuiltTokenizer(backend, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, chat_template)
