"""Computed blocks kept and shared by content."""
