"""What the engine and the server need of a tokenizer.

Contract: a ``Tokenizer`` never changes after it is made and may be used by many threads at once. Every mistake in a
request is a ``RequestError``; whatever a client sends, nothing else is raised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from mini_infer.text.detokenizer import Detokenizer


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included. Ids may have holes and may be fewer than the logits."""
        ...

    @property
    def valid_ids(self) -> Collection[int]:
        """The ids that have a token; ``in`` takes constant time."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text, as the tokenizer knows them; generation_config.json may name more."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """The id that starts a text, if the tokenizer names one; whether ``encode`` adds it is its own choice."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether ``apply_chat_template`` can work."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; spelled-out control tokens become control tokens.

        Args:
            text: any Unicode text.
            add_special_tokens: add what the model expects around a text, such as BOS.

        Raises:
            RequestError: the text is not valid Unicode (a lone surrogate).
        """
        ...

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a text, nothing added, in which spelled-out control tokens stay text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids, in one shot; ids without a token give nothing."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for: half a character is possible, b"" for an id without a token."""
        ...

    def token_text(self, token_id: int) -> str:
        """``token_bytes`` as text, as logprobs show it; broken characters become U+FFFD."""
        ...

    def detokenizer(self, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        """A new incremental detokeniser (see ``make_detokenizer``)."""
        ...

    def apply_chat_template(
        self,
        messages: object,
        tools: object = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[int]:
        """The ids of a chat. Control tokens in it are the template's own; users' spellings stay text.

        Args:
            messages: OpenAI chat messages (see ``normalise_messages``).
            tools: OpenAI tool definitions, or None.
            add_generation_prompt: end with what opens an assistant's turn.
            variables: further template variables, such as ``enable_thinking`` (``chat_template_kwargs``).
            chat_template: used instead of the model's own.

        Raises:
            RequestError: there is no template, or messages, tools or variables are wrong or not to its liking.
        """
        ...
