"""Drawing tokens on a GPU."""
