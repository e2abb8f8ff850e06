"""The table that workers of one host and user share: a file in memory, with a row for each worker.

Rows and their order change under a lock that is held for microseconds. The kernel releases locks with their file
descriptor, so a process that is killed leaves none behind, and its row is known to be free by the lock that it held on
it all its life. That works between containers too, where process numbers mean nothing.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.private import open_directory, open_file
from penstock.runtime.turns.order import CoreClaim, Stage, Standing

_NAME = "turns-1"
"""The number changes with the layout."""
_ROWS, _HEAD, _ROW_BYTES, _CORE_BYTES = 64, 64, 256, 128
_COUNT, _WORD = struct.Struct("=Q"), struct.Struct("=I")
_CHANGES, _NEWS = 0, 8
"""Places in the head: how often workers came and left, and the word on which workers sleep."""
_CLAIM = struct.Struct(f"={_CORE_BYTES}sIIQ")
_STATE = struct.Struct("=BBB5xd")
_STREAMS = struct.Struct("=Idd")
_STATE_AT = _CLAIM.size
_DUE = struct.Struct("=d")
_DUE_AT = _STATE_AT + _STATE.size - _DUE.size
_STREAMS_AT = _STATE_AT + _STATE.size
_LOCK = struct.Struct("hhqqi4x")
_TRY_S, _PAUSE_S = 0.02, 0.00005
"""Whoever has the table's lock for longer was stopped meanwhile."""
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE = 0, 1


class TableStuck(Exception):
    """A process that holds the table's lock does not go on."""


@dataclass(frozen=True, slots=True)
class Streams:
    """What a worker says of its streams."""

    count: int
    step_s: float
    """Seconds that a step of theirs takes."""
    told: float
    """When, on the monotonic clock."""


class TurnTable:
    """One worker's view of the table; its row is free again when it is closed. For one thread at a time, but for
    `streams`, `tell` and `changes`."""

    def __init__(self, directory: Path, claim: CoreClaim) -> None:
        """Raises OSError where the directory or file cannot be had, is another user's, or has no row left."""
        opened = open_directory(directory)
        try:
            self._file = open_file(_NAME, os.O_RDWR | os.O_CREAT, opened, directory)
        finally:
            os.close(opened)
        try:
            size = _HEAD + _ROWS * _ROW_BYTES
            os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
        except BaseException:
            os.close(self._file)
            raise
        self._word: ctypes.c_uint32 | None = ctypes.c_uint32.from_buffer(self._memory, _NEWS)
        self._libc = ctypes.CDLL(None)
        try:
            self.row = self._join(claim)
        except BaseException:
            self._release()
            raise

    def close(self) -> None:
        """Leaves the table."""
        try:
            with self.locked():
                self._clear(self.row)
        except TableStuck:
            pass  # the kernel releases the row; others clear it
        self._release()

    # The lock, and waiting

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the table's lock: nothing slow in there. Raises TableStuck."""
        end = 0.0
        while not self._try_lock(0):
            now = time.monotonic()
            end = end or now + _TRY_S
            if now > end:
                raise TableStuck
            time.sleep(_PAUSE_S)
        try:
            yield
        finally:
            self._set_lock(fcntl.F_UNLCK, 0)

    @property
    def news(self) -> int:
        """Changes when turns end; read it under the lock, for `sleep`."""
        return int(_WORD.unpack_from(self._memory, _NEWS)[0])

    def sleep(self, news: int, seconds: float) -> None:
        """Until turns have ended since `news` was read, or so many seconds; sometimes less."""
        if _FUTEX is None or self._word is None:
            time.sleep(min(seconds, 0.001))
            return
        whole, part = divmod(seconds, 1.0)
        limit = (ctypes.c_long * 2)(int(whole), int(part * 1e9))
        self._futex(_WAIT, news, ctypes.byref(limit))

    def wake(self) -> None:
        """Wakes all that sleep. Under the lock."""
        _WORD.pack_into(self._memory, _NEWS, (self.news + 1) & 0xFFFFFFFF)
        if _FUTEX is not None and self._word is not None:
            self._futex(_WAKE, _ROWS, None)

    def _futex(self, operation: int, value: int, limit: object) -> None:
        assert self._word is not None and _FUTEX is not None
        long = ctypes.c_long
        self._libc.syscall(long(_FUTEX), ctypes.byref(self._word), long(operation), long(value), limit, None, long(0))

    # Rows

    @property
    def changes(self) -> int:
        """How often workers came and left."""
        return int(_COUNT.unpack_from(self._memory, _CHANGES)[0])

    def rows(self) -> dict[int, CoreClaim]:
        """The workers that are there. Under the lock."""
        return {row: claim for row in range(_ROWS) if (claim := self._claim(row)).threads}

    def standing(self, row: int, claim: CoreClaim) -> Standing:
        """Where the worker stands. Under the lock."""
        stage, decodes, owed, due = _STATE.unpack_from(self._memory, self._at(row) + _STATE_AT)
        return Standing(claim, Stage(stage), bool(decodes), bool(owed), due)

    def put(self, row: int, standing: Standing) -> None:
        """Under the lock."""
        state = (standing.stage, standing.decodes, standing.owed, standing.due)
        _STATE.pack_into(self._memory, self._at(row) + _STATE_AT, *state)

    def owe(self, row: int) -> None:
        """Says that the worker is owed a turn. Under the lock."""
        self._memory[self._at(row) + _STATE_AT + 2] = 1

    def renew(self, due: float) -> None:
        """Says that others shall count with this worker until `due`."""
        _DUE.pack_into(self._memory, self._at(self.row) + _DUE_AT, due)

    def streams(self, row: int) -> Streams:
        """What the worker has told last."""
        return Streams(*_STREAMS.unpack_from(self._memory, self._at(row) + _STREAMS_AT))

    def tell(self, streams: Streams) -> None:
        """Says it of this worker."""
        place = self._at(self.row) + _STREAMS_AT
        _STREAMS.pack_into(self._memory, place, streams.count, streams.step_s, streams.told)

    def clear_dead(self, row: int) -> bool:
        """Frees the row of a worker that is gone, and says whether it did. Under the lock."""
        if not self._claim(row).threads or not self._try_lock(self._at(row)):
            return False
        self._clear(row)
        self._set_lock(fcntl.F_UNLCK, self._at(row))
        return True

    def _join(self, claim: CoreClaim) -> int:
        with self.locked():
            for row in range(_ROWS):
                if self._try_lock(self._at(row)):  # held from now on
                    cores = claim.cores.to_bytes(_CORE_BYTES, "little")
                    self._clear(row)
                    _CLAIM.pack_into(self._memory, self._at(row), cores, claim.threads, claim.quota, claim.group)
                    self.put(row, Standing(claim))
                    return row
        raise OSError(errno.ENOSPC, f"there are {_ROWS} workers already", _NAME)

    def _clear(self, row: int) -> None:
        self._memory[self._at(row) : self._at(row) + _ROW_BYTES] = bytes(_ROW_BYTES)
        _COUNT.pack_into(self._memory, _CHANGES, self.changes + 1)
        self.wake()

    def _claim(self, row: int) -> CoreClaim:
        cores, threads, quota, group = _CLAIM.unpack_from(self._memory, self._at(row))
        return CoreClaim(int.from_bytes(cores, "little"), threads, group, quota)

    @staticmethod
    def _at(row: int) -> int:
        return _HEAD + row * _ROW_BYTES

    def _try_lock(self, place: int) -> bool:
        try:
            self._set_lock(fcntl.F_WRLCK, place)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def _set_lock(self, kind: int, place: int) -> None:
        """Locks of an open file, not of a process: those of two workers in one process are two."""
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, place, 1, 0))

    def _release(self) -> None:
        self._word = None  # it points into the memory
        self._memory.close()
        os.close(self._file)
