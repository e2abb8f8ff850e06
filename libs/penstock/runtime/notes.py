"""Words that were costly to find, in small files that can be made again."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

_MOST = 256
"""Notes in one directory; the oldest go."""


def read_note(path: Path) -> str | None:
    """The word of a note; None when there is none, or not a whole one. A note holds a word and its checksum."""
    try:
        word, check = path.read_text().split()
    except (OSError, ValueError):
        return None
    return word if _check(word) == check else None


def write_note(path: Path, word: str) -> None:
    """Writes a note, whole or not at all. One that cannot be written only costs time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(f"{word} {_check(word)}\n")
        os.replace(part, path)
        notes = sorted(path.parent.iterdir(), key=lambda other: other.stat().st_mtime_ns)
        for old in notes[:-_MOST]:
            old.unlink()


def _check(word: str) -> str:
    return hashlib.sha256(word.encode()).hexdigest()[:16]
