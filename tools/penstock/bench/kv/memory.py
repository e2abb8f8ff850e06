"""Memory that starts at a page, as a worker's pages do, and plain copies of it."""

from __future__ import annotations

import ctypes
import mmap
import time

CUT_BYTES = 1 << 20
"""A plain copy is made in cuts of this size."""


class Region:
    """Page-aligned bytes: of this process alone, or of a file descriptor."""

    def __init__(self, size: int, fd: int = -1) -> None:
        self.view = memoryview(mmap.mmap(fd, size))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))

    def blocks(self, size: int) -> list[memoryview]:
        """The region cut into blocks."""
        return [self.view[at : at + size] for at in range(0, self.view.nbytes, size)]

    def touch(self, value: int) -> None:
        """Has the kernel provide every page."""
        for cut in self.blocks(CUT_BYTES):
            cut[:] = bytes((value,)) * cut.nbytes


def copy_all(target: Region, source: Region) -> float:
    """Copies everything with the C library's memmove; returns seconds."""
    size = target.view.nbytes
    begin = time.perf_counter()
    for at in range(0, size, CUT_BYTES):
        ctypes.memmove(target._address + at, source._address + at, min(CUT_BYTES, size - at))
    return time.perf_counter() - begin
