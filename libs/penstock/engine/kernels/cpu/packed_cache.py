"""Packed files by name in a directory that several processes use: one makes a file, all map it.

The cache can be removed at any time. A file is made under a lock and under another name, and then renamed. A process
that dies in between leaves a part behind, which the next one to make a file removes.
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
"""Stay free on the disk."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Obtained:
    """Matrices whose tensors are the file's bytes."""

    matrices: Mapping[str, Packed]
    nbytes: int
    made: bool
    """By this call."""


class PackedCache:
    """At most `limit` bytes of files in `directory`; what was used longest ago goes first."""

    def __init__(self, directory: Path, limit: int, checksums: Checksums) -> None:
        self._directory = directory
        self._limit = limit
        self._checksums = checksums

    def obtain(self, name: str, nbytes: int, make: Callable[[int], None]) -> Obtained:
        """The file `name`, which has about `nbytes`. When it is not there, or not sound, `make` fills one that is open.

        Of several processes that want it, one makes it and the others wait. Raises OSError when there is no place
        for it, and what `make` raises.
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
        """What is there, if it is sound and our own."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            reason = misuse(os.fstat(file))
            if reason is not None:
                raise Unusable(f"the file {reason}")
            matrices, nbytes, unchecked = read(file, self._checksums)
            with suppress(OSError):  # of a directory that may only be read
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
        """Makes room for so many bytes, and removes what was left half-made. Called under the lock."""
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
    """That the file has been checked, if it is still the same one."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(file).st_ino == inode:
            checked(file)
    finally:
        os.close(file)
