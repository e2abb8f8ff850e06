"""Guessing the next tokens, asking for guesses, and accepting those that are right."""
