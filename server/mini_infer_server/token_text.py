"""A token as logprobs show it: its text, or its bytes where they are no whole characters.

Source: https://platform.openai.com/docs/api-reference/chat/object (``logprobs.content[].bytes``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mini_infer.text.tokenizer import Tokenizer


class TokenText:
    """Tokens of one tokenizer; without one, a token is shown by its id."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token."""
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def text(self, token_id: int, broken_prefix: str = "") -> str:
        """The token's text; parts of characters are written ``\\xe2\\x82`` after ``broken_prefix``.

        So two tokens never look the same for being broken, as they would with U+FFFD.
        """
        data = self.bytes(token_id)
        if data is None:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return broken_prefix + "".join(f"\\x{byte:02x}" for byte in data)
