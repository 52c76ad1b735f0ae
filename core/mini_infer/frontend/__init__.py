"""The text half: prompts and chats to checked requests, tokens to text."""

from mini_infer.frontend.frontend import NO_OPTIONS, Frontend, RequestBook, RequestOptions

__all__ = ["NO_OPTIONS", "Frontend", "RequestBook", "RequestOptions"]
