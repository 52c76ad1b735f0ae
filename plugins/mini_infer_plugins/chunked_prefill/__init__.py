"""Prompts in chunks beside running decodes."""
