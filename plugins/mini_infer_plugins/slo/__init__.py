"""Targets for the first token and for the time between tokens."""
