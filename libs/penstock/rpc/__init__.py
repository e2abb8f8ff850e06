"""One place each for serving, channels, error mapping, and what travels beside a call."""
