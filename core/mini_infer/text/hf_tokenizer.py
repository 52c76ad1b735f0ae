"""The tokenizers of Hugging Face behind our ``Tokenizer`` protocol.

Contract: the ids are those that transformers gives for the same files, but that control tokens which users spell out
in a chat stay text. transformers is imported by ``load_tokenizer`` only, as it takes seconds.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from mini_infer.errors import ConfigError, RequestError, in_one_line
from mini_infer.text.detokenizer import Detokenizer, make_detokenizer
from mini_infer.text.token_bytes import TokenBytes
from mini_infer.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    import tokenizers
    from transformers import PreTrainedTokenizerFast

    from mini_infer.text.chat_template import ChatTemplate
    from mini_infer.text.control_text import ControlText


class _Chat(NamedTuple):
    """A compiled template, and the control tokens that it may write."""

    template: ChatTemplate
    control: ControlText


class HFTokenizer(Tokenizer):
    """A fast tokenizer of transformers.

    Args:
        hf: it must not be changed afterwards; truncation and padding are switched off.
    """

    def __init__(self, hf: PreTrainedTokenizerFast) -> None:
        self.hf = hf
        self._backend: tokenizers.Tokenizer = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._token_bytes = TokenBytes(self._backend)
        self._chats: dict[str, _Chat] = {}  # the model's own templates

    @cached_property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def valid_ids(self) -> Collection[int]:
        ids = frozenset(self._backend.get_vocab(with_added_tokens=True).values())
        return range(len(ids)) if ids == frozenset(range(len(ids))) else ids

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        return () if self.hf.eos_token_id is None else (int(self.hf.eos_token_id),)

    @cached_property
    def bos_token_id(self) -> int | None:
        return None if self.hf.bos_token_id is None else int(self.hf.bos_token_id)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return _encoded(lambda: self._backend.encode(text, add_special_tokens=add_special_tokens).ids, param="prompt")

    def encode_plain(self, text: str) -> list[int]:
        return _encoded(lambda: self._plain.encode_plain(text), param="prompt")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self._token_bytes[token_id]

    def token_text(self, token_id: int) -> str:
        return self._token_bytes[token_id].decode(errors="replace")

    def detokenizer(self, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        return make_detokenizer(
            self._token_bytes, skip_special_tokens=skip_special_tokens, prompt_token_ids=prompt_token_ids
        )

    def apply_chat_template(
        self,
        messages: object,
        tools: object = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[int]:
        from mini_infer.text.chat_messages import normalise_messages, normalise_tools, plain_json

        given = [
            normalise_messages(messages),
            normalise_tools(tools),
            plain_json(variables or {}, "chat_template_kwargs"),
        ]
        chat = self._chat(chat_template, with_tools=given[1] is not None)
        (marked_messages, marked_tools, marked_variables), any_control = chat.control.mark(given)
        text = chat.template.render(
            marked_messages,
            marked_tools,
            add_generation_prompt=add_generation_prompt,
            variables={**self.hf.special_tokens_map, **marked_variables},
        )
        if any_control:
            return _encoded(lambda: chat.control.encode(text), param="messages")
        return _encoded(lambda: self._backend.encode(text, add_special_tokens=False).ids, param="messages")

    @cached_property
    def _plain(self) -> ControlText:
        """The control tokens for text outside a chat: those of the model's own template, if it has one."""
        from mini_infer.text.control_text import ControlText

        return self._chat(None, with_tools=False).control if self.has_chat_template else ControlText(self._backend)

    def _chat(self, source: str | None, *, with_tools: bool) -> _Chat:
        """The template to use; the model's own ones are compiled once, a request's own is not kept."""
        own = _pick_template(self.hf.chat_template, with_tools=with_tools)
        if source is None:
            source = own
        if not source:
            raise RequestError(
                "this model has no chat template: use text completions, or give a chat template",
                param="messages",
                code="chat_template_missing",
            )
        if chat := self._chats.get(source):
            return chat
        chat = self._compile(source)
        if source == own:
            self._chats[source] = chat
        return chat

    def _compile(self, source: str) -> _Chat:
        from mini_infer.text.chat_template import ChatTemplate
        from mini_infer.text.control_text import ControlText

        template = ChatTemplate(source)
        return _Chat(template, ControlText(self._backend, template.literals))


def load_tokenizer(model: str | Path, *, revision: str | None = None, local_files_only: bool = False) -> HFTokenizer:
    """The tokenizer of a local folder or Hugging Face model id.

    Args:
        model: folder or id.
        revision: branch, tag or commit of a model id.
        local_files_only: never ask the network.

    Raises:
        ConfigError: there is none, it cannot be read, or it has no fast form (``tokenizer.json``).
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        hf = AutoTokenizer.from_pretrained(
            str(model), revision=revision, local_files_only=local_files_only, trust_remote_code=False
        )
    except Exception as error:  # a broken file raises whatever its reader raises
        reason = in_one_line(error)[:300]
        raise ConfigError(
            f"no usable tokenizer in {model}: {reason} (engine.skip_tokenizer = true serves token ids without one)"
        ) from error
    if not isinstance(hf, PreTrainedTokenizerFast):
        raise ConfigError(f"the tokenizer in {model} has no fast form: a tokenizer.json is needed")
    if not isinstance(hf.chat_template, str | dict | None):
        raise ConfigError(f"the chat template of {model} must be text, not {hf.chat_template!r:.80}")
    return HFTokenizer(hf)


def _pick_template(templates: str | Mapping[str, str] | None, *, with_tools: bool) -> str | None:
    """A model has one template, or several by name."""
    if templates is None or isinstance(templates, str):
        return templates
    return (templates.get("tool_use") if with_tools else None) or templates.get("default")


def _encoded(encode: Callable[[], list[int]], *, param: str) -> list[int]:
    """Run ``encode``; text that no tokenizer can read is the client's mistake."""
    try:
        return encode()
    except (UnicodeError, TypeError) as error:
        raise RequestError(
            f"{param} must be Unicode text without lone surrogates", param=param, code="invalid_text"
        ) from error
