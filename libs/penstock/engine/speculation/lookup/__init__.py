"""Guesses the next tokens of a sequence from what its own and earlier texts say (suffix decoding, arXiv 2411.04975)."""
