"""Optimisations, one folder each. Nothing heavy is imported when a plugin module is."""
