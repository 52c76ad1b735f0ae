"""What must hold before a request may reach the engine: token ids that exist, a prompt that fits.

Contract: every failure is a ``RequestError`` that names the field and what would be right; nothing is changed, and no
text is tokenised much further than the longest prompt that fits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mini_infer.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mini_infer.messages import ModelFacts
    from mini_infer.sampling_params import SamplingParams
    from mini_infer.text.tokenizer import Tokenizer

_CHARACTERS_PER_TOKEN = 8
"""A first guess: text up to this long a token is tokenised at once."""

_BOUNDARY_TOKENS = 64
"""By how many tokens the head of a text may come out longer than as part of the whole."""


class RequestCheck:
    """The checks that need the model's facts."""

    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer | None) -> None:
        self._facts = facts
        self._longest = min(facts.max_model_len, facts.max_tokens_in_pool)
        known = range(facts.vocab_size) if tokenizer is None else tokenizer.valid_ids
        if isinstance(known, range):  # ids without holes: comparing is enough
            self._num_ids, self._ids = min(len(known), facts.vocab_size), None
        else:
            self._num_ids = facts.vocab_size
            self._ids = frozenset(i for i in known if i < facts.vocab_size)

    def token_ids(self, ids: Iterable[int], param: str) -> None:
        """Raises: RequestError: an id is none of the tokenizer's, or past the logits."""
        for token_id in ids:
            if type(token_id) is not int:
                raise RequestError(f"{param} must hold token ids, not {token_id!r:.40}", param=param)
            if not 0 <= token_id < self._num_ids or (self._ids is not None and token_id not in self._ids):
                raise RequestError(
                    f"{param} holds {token_id}, which is no token of this model (0 to {self._num_ids - 1})",
                    param=param,
                    code="invalid_token_id",
                )

    def prompt(self, token_ids: Sequence[int], param: str) -> None:
        """Raises: RequestError: the prompt is empty, or holds an id that does not exist."""
        if not token_ids:
            raise RequestError(f"{param} is empty: give at least one token", param=param, code="empty_prompt")
        self.token_ids(token_ids, param)

    def room(self, num_prompt_tokens: int, max_tokens: int | None, param: str) -> int:
        """How many tokens may be generated: ``max_tokens``, cut to what fits behind the prompt.

        Raises:
            RequestError: not one fits though at least one is asked for.
        """
        room = self._longest - num_prompt_tokens
        if room < 0 or (room == 0 and max_tokens != 0):
            raise self.too_long(str(num_prompt_tokens), param)
        return room if max_tokens is None else min(max_tokens, room)

    def too_long(self, num_tokens: str, param: str) -> RequestError:
        """The error for a prompt of ``num_tokens`` tokens."""
        pool_is_smaller = self._facts.max_tokens_in_pool < self._facts.max_model_len
        limit = "the KV cache holds" if pool_is_smaller else "max_model_len is"
        return RequestError(
            f"{param} has {num_tokens} tokens and leaves no room for an answer: {limit} {self._longest} tokens, "
            "prompt and answer together",
            param=param,
            code="context_length_exceeded",
        )

    def encode(self, tokenizer: Tokenizer, text: str, param: str) -> list[int]:
        """The ids of a text, with what the tokenizer adds by default; a hopelessly long one is refused by its head.

        Raises:
            RequestError: it cannot fit, or is not valid Unicode.
        """
        head = self._longest * _CHARACTERS_PER_TOKEN + 256
        while head < len(text):
            num_tokens = len(tokenizer.encode(text[:head]))
            if num_tokens > self._longest + _BOUNDARY_TOKENS:
                raise self.too_long(f"at least {num_tokens - _BOUNDARY_TOKENS}", param)
            head *= 4
        return tokenizer.encode(text)

    def params(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        """Raises: RequestError: sampling parameters that do not suit this model."""
        self.token_ids(params.stop_token_ids, "stop_token_ids")
        self.token_ids(params.logit_bias, "logit_bias")
        if params.stop and tokenizer is None:
            raise RequestError("stop needs a tokenizer, and this model has none: use stop_token_ids", param="stop")
        for name in params.extensions:
            if name not in self._facts.extensions:
                known = ", ".join(self._facts.extensions) or "none"
                raise RequestError(f"no plugin in use takes '{name}' (known: {known})", param=name)
