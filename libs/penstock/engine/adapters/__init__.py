"""Adapters of an engine's model: which there are, and which of them are in memory."""
