"""Guessing the next tokens, and asking for guesses."""
