"""Words that were costly to find, in small files that can be made again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.runtime.private import open_directory, open_file

_MOST = 256
"""Notes in one directory; the oldest go."""


def read_note(path: Path) -> str | None:
    """The word of a note; None when there is none, or not a whole one, or another user can have written it. A note
    holds a word and its checksum."""
    try:
        with (
            _directory(path) as directory,
            os.fdopen(open_file(path.name, os.O_RDONLY, directory, path.parent)) as file,
        ):
            word, check = file.read().split()
    except (OSError, ValueError):
        return None
    return word if _check(word) == check else None


def write_note(path: Path, word: str) -> None:
    """Writes a note, whole or not at all. One that cannot be written only costs time."""
    with suppress(OSError), _directory(path) as directory:
        part = f"{path.name}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(open_file(part, flags, directory, path.parent), "w") as file:
            file.write(f"{word} {_check(word)}\n")
        os.replace(part, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        with os.scandir(directory) as entries:
            notes = sorted((one.stat(follow_symlinks=False).st_mtime_ns, one.name) for one in entries)
        for _, old in notes[:-_MOST]:
            os.unlink(old, dir_fd=directory)


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    """That of a note, open; it is made when it is missing. Raises OSError."""
    directory = open_directory(path.parent)
    try:
        yield directory
    finally:
        os.close(directory)


def _check(word: str) -> str:
    return hashlib.sha256(word.encode()).hexdigest()[:16]
