"""FlashAttention as it is installed."""
