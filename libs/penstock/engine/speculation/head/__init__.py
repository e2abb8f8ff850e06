"""A draft head: a layer that guesses from the target's own hidden states (EAGLE-3, arXiv 2503.01840)."""
