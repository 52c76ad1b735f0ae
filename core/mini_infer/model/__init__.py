"""A checkpoint: where it lies, what it says of itself, how its weights come in."""
