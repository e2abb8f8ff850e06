"""memcpy that lets other threads run."""

from __future__ import annotations

import ctypes

_SMALL_BYTES = 32 << 10


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """`target[:] = source`; when they are large, and `source` is not read-only, without the GIL.

    Matters where pages are touched for the first time: a page fault costs more than the copy of the page.
    """
    size = source.nbytes
    if size < _SMALL_BYTES or source.readonly or target.nbytes != size:
        target[:] = source
        return
    whole = ctypes.c_char * size
    ctypes.memmove(whole.from_buffer(target), whole.from_buffer(source), size)
