"""The holder of each slot of a device arena, for clients to read without a call.

The table lies in host memory that the clients map: a memfd of its own, apart from the arena of the host. Its meaning is
that of the table in `penstock.kv.bytes.arena`: entry i is the epoch of slot i's holder, 0 while it has none, and it
changes before another holder gets the slot.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from penstock.kv.bytes.arena import MapError

ID_BYTES = 16
_EPOCH_BYTES = 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class _Table:
    def __init__(self, fd: int, slots: int, access: int) -> None:
        self._mapped = mmap.mmap(fd, ID_BYTES + slots * _EPOCH_BYTES, access=access)
        self._entries = memoryview(self._mapped)[ID_BYTES:].cast("Q")

    def close(self) -> None:
        self._entries.release()
        self._mapped.close()


class EpochTable(_Table):
    """The store's side."""

    def __init__(self, slots: int) -> None:
        self._fd = os.memfd_create("penstock-epochs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, ID_BYTES + slots * _EPOCH_BYTES)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            super().__init__(self._fd, slots, mmap.ACCESS_WRITE)
        except BaseException:
            os.close(self._fd)
            raise
        self.table_id = os.urandom(ID_BYTES)
        self._mapped[:ID_BYTES] = self.table_id

    @property
    def path(self) -> str:
        """The path by which a client of the same host opens the table."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def set(self, slot: int, epoch: int) -> None:
        """Tells clients the epoch of the slot's holder; 0: none."""
        self._entries[slot] = epoch

    def close(self) -> None:
        """Clients' mappings stay as they are."""
        super().close()
        os.close(self._fd)


class EpochMap(_Table):
    """A client's side, read-only."""

    def __init__(self, path: str, table_id: bytes, slots: int) -> None:
        """Raises MapError when `path` does not lead to the table named `table_id`."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = os.fstat(fd).st_size
                if found != ID_BYTES + slots * _EPOCH_BYTES:
                    raise MapError(f"the path leads to a file of {found} bytes, not to the epochs of {slots} slots")
                if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                    raise MapError("the path leads to a file that could change its size")
                super().__init__(fd, slots, mmap.ACCESS_READ)
            finally:
                os.close(fd)
        except OSError as error:
            raise MapError(f"the epoch table can't be mapped: {error.strerror}") from error
        if self._mapped[:ID_BYTES] != table_id:
            self.close()
            raise MapError("the path leads to another epoch table")

    def holds(self, slot: int, epoch: int) -> bool:
        """Whether the slot is still in the hands of `epoch`."""
        return bool(self._entries[slot] == epoch)
