"""The model family qwen3."""
