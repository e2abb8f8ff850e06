"""Pieces that decoders are made of."""
