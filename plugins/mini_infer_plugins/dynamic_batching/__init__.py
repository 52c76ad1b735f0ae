"""Arrivals collected for a moment, so that like prompts run together."""
