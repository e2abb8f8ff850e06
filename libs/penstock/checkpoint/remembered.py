"""Fingerprints of large models, remembered: computing one reads gigabytes, which takes seconds."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from penstock.checkpoint.directory import Checkpoint
from penstock.checkpoint.fingerprint import fingerprint
from penstock.runtime.caches import cache_directory

_WORTH_BYTES = 32 << 20
_SETTLED_NS = 2 * 10**9
"""A file that changed more recently could change again without a new time: clocks of file systems are coarse."""
_MOST = 256


def remembered_fingerprint(checkpoint: Checkpoint, directory: Path | None = None) -> str:
    """`fingerprint`, without reading the weights when none of their files has changed since.

    A file counts as unchanged when its inode, size, time of modification and time of change are the same; no program
    can set the last one back. `directory` is where names are kept, by default the user's cache. Raises CheckpointError.
    """
    before = _state(checkpoint)
    if before is None or sum(size for _, _, size, _, _ in before) < _WORTH_BYTES:
        return fingerprint(checkpoint)
    described = json.dumps([1, asdict(checkpoint.config), before], sort_keys=True).encode()
    try:
        note = (directory or cache_directory("fingerprints")) / hashlib.sha256(described).hexdigest()
    except OSError:
        return fingerprint(checkpoint)
    known = _noted(note)
    if known is not None:
        return known
    found = fingerprint(checkpoint)
    if _state(checkpoint) == before and max(changed for *_, changed in before) < time.time_ns() - _SETTLED_NS:
        _write(note, found)
    return found


def _state(checkpoint: Checkpoint) -> list[tuple[int, int, int, int, int]] | None:
    """(device, inode, size, modified, changed) of each file of weights."""
    try:
        found = [file.stat() for file in checkpoint.weight_files]
    except OSError:
        return None
    return [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found]


def _noted(note: Path) -> str | None:
    """A note holds a fingerprint and its own checksum."""
    try:
        name, check = note.read_text().split()
    except (OSError, ValueError):
        return None
    return name if _check(name) == check else None


def _check(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _write(note: Path, name: str) -> None:
    """Whole or not at all; a cache that cannot be written only costs time."""
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = note.with_suffix(f".{os.getpid()}")
        part.write_text(f"{name} {_check(name)}\n")
        os.replace(part, note)
        notes = sorted(note.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for old in notes[:-_MOST]:
            old.unlink()
