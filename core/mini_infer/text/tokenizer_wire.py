"""A tokenizer on its way to another process, which then needs neither the model's files nor transformers.

Contract: ``TokenizerState.of(tokenizer).open()`` gives the same ids and texts as ``tokenizer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from mini_infer.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    from mini_infer.text.tokenizer import Tokenizer


class TokenizerState(msgspec.Struct, frozen=True):
    """All that an ``HFTokenizer`` reads of the tokenizer that it was made from.

    Attributes:
        backend: the Rust tokenizer as JSON.
        chat_template: Jinja source, or several by name.
        special_tokens_map: named special tokens, for templates.
        eos_token_id, bos_token_id: their ids, if there are such.
    """

    backend: str
    chat_template: str | dict[str, str] | None
    special_tokens_map: dict[str, Any]
    eos_token_id: int | None
    bos_token_id: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerState:
        """The state of a tokenizer.

        Raises:
            ConfigError: it is not an ``HFTokenizer``, the only kind that can be sent.
        """
        from mini_infer.text.hf_tokenizer import HFTokenizer

        if not isinstance(tokenizer, HFTokenizer):
            raise ConfigError(f"a {type(tokenizer).__name__} cannot serve over HTTP: use an HFTokenizer")
        hf = tokenizer.hf
        named = {
            name: [str(token) for token in value] if isinstance(value, list) else str(value)
            for name, value in hf.special_tokens_map.items()
        }
        return cls(hf.backend_tokenizer.to_str(), hf.chat_template, named, hf.eos_token_id, hf.bos_token_id)

    def open(self) -> Tokenizer:
        """The tokenizer again."""
        from tokenizers import Tokenizer as Backend

        from mini_infer.text.hf_tokenizer import HFTokenizer

        return HFTokenizer(cast("PreTrainedTokenizerFast", _Opened(self, Backend.from_str(self.backend))))


class _Opened:
    """What ``HFTokenizer`` reads of a tokenizer of transformers, under the same names."""

    def __init__(self, state: TokenizerState, backend: tokenizers.Tokenizer) -> None:
        self.backend_tokenizer = backend
        self.chat_template = state.chat_template
        self.special_tokens_map = state.special_tokens_map
        self.eos_token_id = state.eos_token_id
        self.bos_token_id = state.bos_token_id
