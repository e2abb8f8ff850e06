"""The directories of files that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(part: str) -> Path:
    """$XDG_CACHE_HOME/penstock/PART, else ~/.cache/penstock/PART; may not exist yet. OSError: there is no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "penstock" / part
    except RuntimeError as error:
        raise OSError(str(error)) from None
