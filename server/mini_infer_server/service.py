"""What every handler works with: the engine, its name, and who may ask.

Contract: made once when the application is; Litestar injects it as ``service``.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from typing import TYPE_CHECKING

from mini_infer_server.errors import APIError
from mini_infer_server.requests import BodyDecoder, ChatRequest, CompletionRequest
from mini_infer_server.token_text import TokenText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.async_llm import AsyncLLM

SILENCE_SECONDS = 120.0
"""An engine that was not heard of for so long counts as hung. One step of a slow machine may take a while."""


class Service:
    """One engine behind HTTP.

    Args:
        llm: started.
        model: the name that clients use.
        api_keys: accepted bearer tokens; none lets everybody in.
    """

    def __init__(self, llm: AsyncLLM, model: str, api_keys: Sequence[str] = ()) -> None:
        self.llm = llm
        self.model = model
        self.created = int(time.time())
        self.tokens = TokenText(llm.frontend.tokenizer)
        self.chat_decoder = BodyDecoder(ChatRequest)
        self.completion_decoder = BodyDecoder(CompletionRequest)
        self._key_digests = [_digest(key) for key in api_keys]

    @property
    def healthy(self) -> bool:
        """Whether the engine lives and was heard of lately."""
        return self.llm.alive and time.monotonic() - self.llm.last_sign_of_life < SILENCE_SECONDS

    def check_model(self, name: str | None) -> None:
        """Raises: APIError: 404, another model was asked for."""
        if name is not None and name != self.model:
            raise APIError(
                404,
                f"the model {name!r:.200} does not exist here: use {self.model!r}",
                param="model",
                code="model_not_found",
            )

    def check_key(self, authorization: str | None) -> None:
        """Raises: APIError: 401, no accepted key. Takes the same time for every wrong key."""
        if not self._key_digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip())
        known = [hmac.compare_digest(digest, other) for other in self._key_digests]
        if scheme.lower() != "bearer" or not any(known):
            raise APIError(
                401, "give an API key: Authorization: Bearer KEY", code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )  # fmt: skip


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
