"""Attention by FlashInfer."""
