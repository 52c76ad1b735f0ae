"""The model family qwen2."""
