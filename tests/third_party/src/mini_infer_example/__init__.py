"""Plugins for Mini-Infer from outside: ``shortest-prompt-first`` and ``ban-tokens``."""
