"""The embedded model pair, and the code that trained it.

Importing this package costs nothing: torch, tokenizers and transformers are imported only by the modules
that need them, and none of those is imported here.
"""

from __future__ import annotations

from pathlib import Path

NAMES = ("penstock-mini", "penstock-mini-draft")

__all__ = ["NAMES", "embedded"]


def embedded(name: str) -> Path:
    """The directory of an embedded model, `penstock-mini` or its draft `penstock-mini-draft`.

    Raises KeyError for any other name, so that a caller can fall back to reading `name` as a path.
    """
    if name not in NAMES:
        raise KeyError(f"no embedded model is called {name!r}; there are {', '.join(NAMES)}")
    return Path(__file__).parent / name
