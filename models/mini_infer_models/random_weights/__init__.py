"""The weight loader for random weights."""
