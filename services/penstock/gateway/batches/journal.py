"""A file of lines that only grows, and that a crash leaves with whole lines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from penstock.runtime.disk import settle, write_all

_BACK_BYTES = 1 << 16


class LineJournal:
    """Belongs to whoever has the right to write the file. Every method may block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._size = 0

    def open(self) -> None:
        """Cuts off a last line that was not written to its end."""
        if self._path.exists():
            self._open()
            self._size = _whole_lines(self._file)
            os.ftruncate(self._file, self._size)

    def close(self) -> None:
        """A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def append(self, lines: Sequence[bytes]) -> None:
        """Adds lines, each with its end. They are on the disk when this returns, and none is there when it raises
        OSError."""
        if not lines:
            return
        if self._descriptor is None:
            self._open()
        data = b"".join(lines)
        try:
            write_all(self._file, data)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)  # where that fails too, `open` does it
            raise
        self._size += len(data)

    @property
    def _file(self) -> int:
        assert self._descriptor is not None, "it is open"
        return self._descriptor

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        settle(self._path.parent)


def _whole_lines(file: int) -> int:
    """Bytes up to the end of the last line that has one."""
    end = os.lseek(file, 0, os.SEEK_END)
    while end:
        start = max(0, end - _BACK_BYTES)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
