"""The decoders."""
