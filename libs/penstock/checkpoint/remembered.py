"""Fingerprints of large models, remembered: computing one reads gigabytes, which takes seconds."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict
from pathlib import Path

from penstock.checkpoint.directory import Checkpoint
from penstock.checkpoint.fingerprint import fingerprint
from penstock.runtime.caches import cache_directory
from penstock.runtime.notes import read_note, write_note

_WORTH_BYTES = 32 << 20
_SETTLED_NS = 2 * 10**9
"""A file that changed more recently could change again without a new time: clocks of file systems are coarse."""


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
    known = read_note(note)
    if known is not None:
        return known
    found = fingerprint(checkpoint)
    if _state(checkpoint) == before and max(changed for *_, changed in before) < time.time_ns() - _SETTLED_NS:
        write_note(note, found)
    return found


def _state(checkpoint: Checkpoint) -> list[tuple[int, int, int, int, int]] | None:
    """(device, inode, size, modified, changed) of each file of weights."""
    try:
        found = [file.stat() for file in checkpoint.weight_files]
    except OSError:
        return None
    return [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found]
