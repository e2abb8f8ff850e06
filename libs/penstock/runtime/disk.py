"""Files that are as they were written also after a crash. Every function may block."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def closing(descriptors: list[int]) -> Iterator[None]:
    """At the block's end all of them are closed: a thread may have opened one of which its caller has not heard."""
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def lock_file(mark: Path, opened: list[int]) -> bool:
    """Takes the lock of the file, whose descriptor goes to `opened`; False when another one has it, or the file has
    gone."""
    try:
        opened.append(os.open(mark, os.O_RDWR | os.O_CLOEXEC))
        fcntl.flock(opened[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return False
    return True


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file as a whole: who looks finds the old one or the new one, also after a crash. Only its owner may read
    it."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with closing([descriptor]):
            write_all(descriptor, data)
            os.fsync(descriptor)
        rename_file(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def rename_file(old: Path, new: Path) -> None:
    """Renames a file within its directory, for good."""
    old.replace(new)
    settle(new.parent)


def settle(directory: Path) -> None:
    """What was made, renamed or deleted there is so after a crash too."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of it; raises OSError after a part where the disk is full."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def age_s(path: Path) -> float:
    """Seconds since it was written; 0 where it is missing."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
