"""The forward pass through ``torch.compile``."""
