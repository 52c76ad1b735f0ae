"""The OpenAI-compatible server on Litestar."""
