"""The few calls to the operating system that the disk tier makes, in one place so that tests can make them fail."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from penstock.kvstore.tiers.disk.format import PAGE

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Files:
    """Blocking calls; they raise OSError. Files are for the owner alone."""

    def open(self, path: Path, *, direct: bool) -> int:
        """A file descriptor. With `direct` the page cache is left out; EINVAL where that can't be."""
        return os.open(path, _FLAGS | (os.O_DIRECT if direct else 0), 0o600)

    def size(self, fd: int) -> int:
        """Bytes of a file."""
        return os.fstat(fd).st_size

    def allocate(self, fd: int, size: int) -> None:
        """Has the file system set `size` bytes aside, so that writes into them can't run out of space."""
        os.posix_fallocate(fd, 0, size)

    def read(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        """As preadv."""
        return os.preadv(fd, buffers, at)

    def write(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        """As pwritev."""
        return os.pwritev(fd, buffers, at)

    def sync(self, fd: int) -> None:
        """As fdatasync."""
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        """As close."""
        os.close(fd)


def read_all(files: Files, fd: int, buffers: Sequence[memoryview], at: int) -> None:
    """Fills all buffers. Raises OSError also when the file is shorter."""
    wanted = sum(buffer.nbytes for buffer in buffers)
    got = files.read(fd, buffers, at)
    if got != wanted:
        raise OSError(errno.EIO, f"{got} of {wanted} bytes were read")


def write_all(files: Files, fd: int, buffers: Sequence[memoryview], at: int) -> None:
    """Writes all buffers. Raises OSError also when only a part could be written."""
    wanted = sum(buffer.nbytes for buffer in buffers)
    written = files.write(fd, buffers, at)
    if written != wanted:
        raise OSError(errno.ENOSPC, f"{written} of {wanted} bytes were written")


def pages(size: int) -> memoryview:
    """A zeroed buffer that begins at a page, as calls that bypass the page cache need it."""
    return memoryview(mmap.mmap(-1, -(-size // PAGE) * PAGE))
