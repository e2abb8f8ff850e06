"""A directory of packed files that several processes use: one process makes a file, and all map it.

The cache can be deleted at any time. A file is made under a lock and under another name, and then renamed. A process
that dies meanwhile leaves a part behind, which the next process that makes a file removes.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.kernels.cpu.packed import Packed
from penstock.engine.kernels.cpu.packed_file import FORMAT, Checksums, Unusable, checked, read
from penstock.runtime.private import locked, misuse

_SPARE_BYTES = 256 << 20
"""Bytes that stay free on the disk."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Obtained:
    """Matrices whose tensors are the file's bytes."""

    matrices: Mapping[str, Packed]
    nbytes: int
    made: bool
    """Whether this call made the file."""


class PackedCache:
    """Keeps at most `limit` bytes of files in `directory`; the file that was used longest ago goes first."""

    def __init__(self, directory: Path, limit: int, checksums: Checksums) -> None:
        self._directory = directory
        self._limit = limit
        self._checksums = checksums

    def obtain(self, name: str, nbytes: int, make: Callable[[int], None]) -> Obtained:
        """The matrices of the file `name`, which has about `nbytes`. If it is missing or damaged, `make` fills a new
        file, whose descriptor it gets.

        If several processes want the file, one makes it and the others wait. Raises OSError when there is no room for
        it, and whatever `make` raises.
        """
        path = self._directory / f"{name}-v{FORMAT}.packed"
        found = self._use(path)
        if found is not None:
            return found
        with locked(self._directory):
            found = self._use(path)
            if found is not None:
                return found
            self._clear(nbytes)
            return self._make(path, make)

    def _use(self, path: Path) -> Obtained | None:
        """The matrices of the file, if it is there, sound and our own."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            reason = misuse(os.fstat(file))
            if reason is not None:
                raise Unusable(f"the file {reason}")
            matrices, nbytes, unchecked = read(file, self._checksums)
            with suppress(OSError):  # the directory may be read-only
                os.utime(path)
                if unchecked:
                    _note(path, os.fstat(file).st_ino)
            return Obtained(matrices, nbytes, made=False)
        except Unusable as reason:
            _log.warning("the packed weights in %s are not used: %s", path, reason)
            return None
        finally:
            os.close(file)

    def _make(self, path: Path, make: Callable[[int], None]) -> Obtained:
        part = path.with_suffix(".part")
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            make(file)
            os.rename(part, path)
            matrices, nbytes, _ = read(file, self._checksums)
            return Obtained(matrices, nbytes, made=True)
        except Unusable as reason:
            raise OSError(errno.EIO, f"what was written to {path} is not what is read: {reason}") from None
        finally:
            os.close(file)
            with suppress(FileNotFoundError):
                os.unlink(part)

    def _clear(self, nbytes: int) -> None:
        """Makes room for so many bytes, and removes files that were left half-made. Called under the lock."""
        for part in self._directory.glob("*.part"):
            part.unlink()
        if nbytes > self._limit:
            raise OSError(errno.EFBIG, f"{nbytes} bytes are more than the {self._limit} that may be kept")
        kept = sorted((path.stat().st_mtime_ns, path.stat().st_size, path) for path in self._directory.glob("*.packed"))
        total = sum(size for _, size, _ in kept)
        for _, size, path in kept:
            if total + nbytes <= self._limit:
                break
            path.unlink()  # processes that have mapped it keep it
            total -= size
        disk = os.statvfs(self._directory)
        if disk.f_bavail * disk.f_frsize < nbytes + _SPARE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _note(path: Path, inode: int) -> None:
    """Notes in the file that it has been checked, if it is still the same file."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(file).st_ino == inode:
            checked(file)
    finally:
        os.close(file)
