"""What the directory's file system can: reading and writing one file from its beginning to its end."""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_CALL_BYTES = 4 << 20
_AT_ONCE = 4
"""As the disk tier does it: calls of 4 MiB, four reads at a time."""

Call = Callable[[int, memoryview, int], int]


class PlainFile:
    """Rates in bytes/s. `direct`: without the page cache."""

    def __init__(self, path: Path, size: int, *, direct: bool) -> None:
        self._size = size
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._fd = os.open(path, flags, 0o600)
        self._direct = direct
        self._buffers = [memoryview(mmap.mmap(-1, _CALL_BYTES)) for _ in range(_AT_ONCE)]
        for buffer in self._buffers:
            buffer[:] = os.urandom(_CALL_BYTES)
        os.posix_fallocate(self._fd, 0, size)
        self._write_all()

    async def read(self, round: int) -> float:
        """Several reads at a time."""
        self._forget()
        return await asyncio.to_thread(self._timed, _read, _AT_ONCE)

    async def read_singly(self, round: int) -> float:
        """One read after the other."""
        self._forget()
        return await asyncio.to_thread(self._timed, _read, 1)

    async def write(self, round: int) -> float:
        """One write after the other, until all is on the disk."""
        return await asyncio.to_thread(self._write_all)

    def _write_all(self) -> float:
        begin = time.perf_counter()
        self._timed(_write, 1)
        os.fdatasync(self._fd)
        return self._size / (time.perf_counter() - begin)

    def _forget(self) -> None:
        """Leaves nothing in the page cache."""
        if not self._direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _timed(self, call: Call, threads: int) -> float:
        begin = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            for part in [pool.submit(self._part, call, number, threads) for number in range(threads)]:
                part.result()
        return self._size / (time.perf_counter() - begin)

    def _part(self, call: Call, number: int, of: int) -> None:
        for at in range(number * _CALL_BYTES, self._size, of * _CALL_BYTES):
            done = call(self._fd, self._buffers[number], at)
            assert done == _CALL_BYTES, f"{done} bytes at {at}"

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


def _read(fd: int, buffer: memoryview, at: int) -> int:
    return os.preadv(fd, [buffer], at)


def _write(fd: int, buffer: memoryview, at: int) -> int:
    return os.pwritev(fd, [buffer], at)
