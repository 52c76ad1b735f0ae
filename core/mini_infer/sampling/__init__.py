"""From logits to tokens: noise, penalties, truncation, acceptance of drafts, log-probabilities."""
