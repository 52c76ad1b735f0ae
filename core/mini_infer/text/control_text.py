"""Control tokens that a user spells out stay text; those that the chat template writes are real.

Contract: in ``encode`` and ``encode_plain`` no id of a control token comes from a user's characters, in any
tokenizer, and those characters are otherwise encoded as if the tokenizer knew no control tokens: they merge with
their neighbours, and pre-tokenizer, normaliser and prefix spaces act on the text as a whole.

How: a second copy of the tokenizer is made in which each control token has the same id but a secret spelling, new in
each process. Before the template runs, control tokens in the users' strings are put between two secret marks. After
it, what stands between marks loses them, and every other control token, the template's own, gets its secret spelling:

    template and user    <|u|> + hi<|stop|>
    marked               <|u|>hi(<|stop|>)        ( and ) are the marks
    for the copy         5317hi<|stop|>           5317 is the secret spelling of <|u|>

The marked token still stands in the string, so ``'</think>' in content`` and ``split`` work inside a template. Marks
and spellings are digits: no filter (``upper``, ``tojson``, ``trim``) changes them, and no user can guess them.
"""

from __future__ import annotations

import json
import re
import secrets
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenizers import Tokenizer

_DIGITS = 20


class ControlText:
    """The control tokens of one tokenizer: its special tokens, and the other added ones that its template writes.

    Args:
        backend: the Rust tokenizer; never changed.
        literals: the texts that the chat template writes. An added token that is not special, such as
            ``<tool_call>``, is a control token if one of them holds it.
    """

    def __init__(self, backend: Tokenizer, literals: Iterable[str] = ()) -> None:
        self._backend = backend
        written = "\0".join(literals)
        added = backend.get_added_tokens_decoder()
        self.ids = {
            token.content: token_id
            for token_id, token in added.items()
            if token.content and (token.special or (token.content.strip() and token.content in written))
        }
        self._folds = any(token.normalized for token in added.values() if token.content in self.ids)
        self._open, self._close, self._secret = (_secret_digits() for _ in range(3))
        # The longest first, as the tokenizer itself prefers the longest of several that start at the same place.
        longest_first = sorted(self.ids, key=len, reverse=True)
        any_control = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._control = re.compile(any_control)
        self._marked = re.compile(
            f"{self._open}(?P<user>{any_control}){self._close}|{self._open}|{self._close}|(?P<own>{any_control})"
        )

    def mark(self, value: Any) -> tuple[Any, bool]:
        """A copy of JSON ``value`` with the control tokens in its strings and keys marked, and whether any are."""
        if isinstance(value, str):
            marked = self._control.sub(f"{self._open}\\g<0>{self._close}", value)
            return marked, marked != value or self._hides_control(value)
        if isinstance(value, dict):
            keys, values = list(value), list(value.values())
            (new_keys, keys_found), (new_values, values_found) = self.mark(keys), self.mark(values)
            return dict(zip(new_keys, new_values, strict=True)), keys_found or values_found
        if isinstance(value, list):
            pairs = [self.mark(item) for item in value]
            return [item for item, _ in pairs], any(found for _, found in pairs)
        return value, False

    def encode(self, marked: str) -> list[int]:
        """The ids of a text that a template rendered from marked values, without BOS or the like."""
        return self._encode_copy(self._marked.sub(self._for_copy, marked))

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a text in which nothing is a control token, without BOS or the like."""
        return self._encode_copy(text)

    def _hides_control(self, text: str) -> bool:
        """Whether the normaliser makes a control token of text that spells none (full-width brackets and such)."""
        normalizer = self._backend.normalizer
        if not self._folds or normalizer is None:
            return False
        return self._control.search(normalizer.normalize_str(text)) is not None

    def _for_copy(self, match: re.Match[str]) -> str:
        own: str | None = match["own"]
        if own is not None:
            return self._spellings[own]
        return match["user"] or ""  # a lone mark: the template took the text apart

    @cached_property
    def _spellings(self) -> dict[str, str]:
        return {token: f"{self._secret}{index:06}" for index, token in enumerate(self.ids)}

    def _encode_copy(self, text: str) -> list[int]:
        copy, original_ids = self._copy
        return [original_ids.get(token_id, token_id) for token_id in copy.encode(text, add_special_tokens=False).ids]

    @cached_property
    def _copy(self) -> tuple[Tokenizer, dict[int, int]]:
        """The tokenizer with secret spellings, and the original ids of control tokens whose id differs there."""
        from tokenizers import Tokenizer

        spec: dict[str, Any] = json.loads(self._backend.to_str())
        for token in spec["added_tokens"]:
            if token["content"] in self._spellings:
                token |= {"content": self._spellings[token["content"]], "normalized": False, "single_word": False}
        _rename_in_model(spec["model"], self._spellings)
        spec |= {"post_processor": None, "truncation": None, "padding": None}
        copy = Tokenizer.from_str(json.dumps(spec))
        new_ids = ((copy.token_to_id(spelling), self.ids[token]) for token, spelling in self._spellings.items())
        return copy, {new: old for new, old in new_ids if new is not None and new != old}


def _rename_in_model(model: dict[str, Any], spellings: dict[str, str]) -> None:
    """Take the control tokens' own spelling from a model's vocabulary, so that no merge can end in one."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {spellings.get(token, token): token_id for token, token_id in vocab.items()}
    else:  # Unigram: [token, score]
        model["vocab"] = [[spellings.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") in spellings:
        model["unk_token"] = spellings[model["unk_token"]]
    if merges := model.get("merges"):
        pairs = (merge if isinstance(merge, list) else merge.split(" ", 1) for merge in merges)
        model["merges"] = [[a, b] for a, b in pairs if not {a, b, a + b} & spellings.keys()]


def _secret_digits() -> str:
    return f"{secrets.randbelow(10**_DIGITS):0{_DIGITS}}"
