"""Directories and files that no other user can have put there or changed.

What is loaded as code, or trusted without another check, has to come from such a place. Checks are made on open
descriptors, never on paths: between two looks at a path another user may have put something else there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def open_directory(path: Path, *, roots: bool = False) -> int:
    """A descriptor of the directory, which is made when it is missing, its parents too, each for this user alone. With
    `roots` one that belongs to root will do as well, as what was installed does.

    Raises PermissionError where it belongs to another user or others can write to it, else OSError.
    """
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    return _checked(directory, path, roots)


def open_file(name: str, flags: int, directory: int, path: Path, *, roots: bool = False) -> int:
    """A descriptor of the file `name` in an open directory, whose path is `path`: new files are this user's alone. With
    `roots` one that belongs to root will do as well.

    Raises PermissionError where it belongs to another user or others can write to it, or is not a plain file, else
    OSError: symbolic links are not followed.
    """
    file = os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=directory)
    return _checked(file, path / name, roots)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Holds the lock of a private directory, which is made when it is missing; gives its descriptor.

    Raises as `open_directory` and `open_file` do.
    """
    directory = open_directory(path)
    try:
        lock = open_file("lock", os.O_RDWR | os.O_CREAT, directory, path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the descriptor, and with the process
            yield directory
        finally:
            os.close(lock)
    finally:
        os.close(directory)


def misuse(status: os.stat_result, *, roots: bool = False) -> str | None:
    """Why a file or directory with this status is not trusted; None if only this user can have written it, or with
    `roots` only root."""
    if status.st_uid != os.geteuid() and not (roots and status.st_uid == 0):
        return f"belongs to user {status.st_uid}, not to user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})"
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return "is neither a plain file nor a directory"
    return None


def _checked(descriptor: int, path: Path, roots: bool) -> int:
    reason = misuse(os.fstat(descriptor), roots=roots)
    if reason is None:
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, f"it {reason}", str(path))
