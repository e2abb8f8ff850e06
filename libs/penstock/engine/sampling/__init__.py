"""From logits to tokens, with randomness that depends on seed and position only."""
