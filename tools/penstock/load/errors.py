"""What a load can't be made of."""

from __future__ import annotations


class LoadError(ValueError):
    """A load that can't be played; the text says why, and what would be right."""
