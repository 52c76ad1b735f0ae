"""GGUF files of llama.cpp: read, and converted into plain Hugging Face folders."""
