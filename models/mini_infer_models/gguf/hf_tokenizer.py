"""The tokenizer inside a GGUF file as tokenizer.json and tokenizer_config.json.

Contract: the ids of any text are those of the model's original tokenizer. What decides that beside vocabulary and
merges is how text is cut before merging; GGUF only names the way (``tokenizer.ggml.pre``), and a name that is not known
here is a ``ConfigError``, never a guess.

Source: the patterns of llama.cpp's ``llm_tokenizer_bpe`` (src/llama-vocab.cpp) under the same names, and the
tokenizer.json files of the models they come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mini_infer.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

    from mini_infer_models.gguf.reader import GGUFFile

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # tokenizer.ggml.token_type
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How text is cut before merging.

    Attributes:
        pattern: the pieces; "" is GPT-2's own pattern.
        single_digits: cut each digit (``\\p{N}``) off first.
        nfc: normalise to NFC before.
        ignore_merges: a piece that is a token needs no merging.
        add_bos: whether a text starts with BOS if the file does not say.
    """

    pattern: str = ""
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(),
    "smollm": _PreTokenizer(single_digits=True),
    "qwen2": _PreTokenizer(_PATTERN.format(digits=""), nfc=True),
    "llama-bpe": _PreTokenizer(_PATTERN.format(digits="{1,3}"), ignore_merges=True, add_bos=True),
}


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """The Rust tokenizer.

    Raises:
        ConfigError: the file's tokenizer is not byte-level BPE, or cuts text in a way that is not known here.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pre = _pre_tokenizer(file)
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    types: list[int] = file.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ")) for merge in file.require("tokenizer.ggml.merges")]
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _cutter(pre)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    _add_bos_and_eos(tokenizer, file, tokens, pre)
    return tokenizer


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """The content of ``tokenizer_config.json``, chat template and named special tokens included."""
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    config: dict[str, Any] = {
        # The one class that takes tokenizer.json as it stands; a family's own class would cut text its own way.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(file.require_model_value("context_length")),
        **{name: tokens[token_id] for name, token_id in ids.items() if token_id is not None},
    }
    if template := file.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _pre_tokenizer(file: GGUFFile) -> _PreTokenizer:
    if (kind := file.require("tokenizer.ggml.model")) != "gpt2":
        raise ConfigError(f"{file.path}: a tokenizer of kind '{kind}' is not supported (byte-level BPE, 'gpt2', is)")
    name = file.get("tokenizer.ggml.pre", "gpt-2")
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ConfigError(f"{file.path}: the pre-tokenizer '{name}' is not known (known: {known})")
    return _PRE_TOKENIZERS[name]


def _cutter(pre: _PreTokenizer) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    if pre.pattern:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if not pre.single_digits:
        return gpt2
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])


def _add_bos_and_eos(tokenizer: Tokenizer, file: GGUFFile, tokens: list[str], pre: _PreTokenizer) -> None:
    from tokenizers import processors

    around = {
        "bos": file.get("tokenizer.ggml.add_bos_token", pre.add_bos),
        "eos": file.get("tokenizer.ggml.add_eos_token", False),
    }
    ids = {name: int(file.require(f"tokenizer.ggml.{name}_token_id")) for name, wanted in around.items() if wanted}
    if not ids:
        return
    named = {name: tokens[token_id] for name, token_id in ids.items()}
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=" ".join(part for part in (named.get("bos"), "$A", named.get("eos")) if part),
                special_tokens=[(named[name], token_id) for name, token_id in ids.items()],
            ),
        ]
    )
