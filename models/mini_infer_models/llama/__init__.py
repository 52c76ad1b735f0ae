"""The model family llama."""
