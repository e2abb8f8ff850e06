"""The shared memory of a store: made and owned by the store, mapped by the clients of its host.

The arena is a memfd. It has no name in the file system, so nothing is left when every process is killed; clients
open it as /proc/<store's pid>/fd/<n>, and the kernel frees it with the last mapping. It is sealed against
changes of size, so that no mapping can fault because the file was truncated::

    0         magic, arena id (16 random bytes)
    64        epoch table: one native u64 per slot, the epoch of the slot's holder, 0 while it has none
    slots_at  slots, `stride` bytes apart

The epoch table lets a client find out, without asking, whether a slot changed hands while it read or before it
writes: the store changes the entry before it gives the slot to another holder.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass

ARENA_ID_BYTES = 16
EPOCHS_AT = 64
_MAGIC = b"penstok1"
_ID = slice(len(_MAGIC), len(_MAGIC) + ARENA_ID_BYTES)
_EPOCH_BYTES = 8
_ALIGN = 64
_PAGE = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MADV_POPULATE_WRITE = 23


class MapError(Exception):
    """The arena can't be mapped, or the path leads to something else."""


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the slots of an arena lie. All in bytes but `slots`."""

    slots: int
    slots_at: int
    stride: int
    epochs_at: int = EPOCHS_AT

    @classmethod
    def gapless(cls, slots: int, block_bytes: int) -> Layout:
        """`slots` blocks of `block_bytes` right behind each other."""
        return cls(slots, _round_up(EPOCHS_AT + slots * _EPOCH_BYTES, _PAGE), block_bytes)

    @classmethod
    def fit(cls, arena_bytes: int, block_bytes: int) -> Layout:
        """As many slots for blocks of `block_bytes` as the arena holds; may be none."""
        stride = _round_up(block_bytes, _ALIGN)
        slots = max(0, (arena_bytes - EPOCHS_AT - _PAGE) // (stride + _EPOCH_BYTES))
        return cls(slots, _round_up(EPOCHS_AT + slots * _EPOCH_BYTES, _PAGE), stride)

    def offset(self, slot: int) -> int:
        """Where slot `slot` begins."""
        return self.slots_at + slot * self.stride

    def slot(self, offset: int) -> int:
        """The slot that begins at `offset`."""
        return (offset - self.slots_at) // self.stride


class _Mapped:
    """A mapping with its epoch table."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)

    def _table(self, layout: Layout) -> memoryview:
        return self._view[layout.epochs_at : layout.epochs_at + layout.slots * _EPOCH_BYTES].cast("Q")

    def _unmap(self) -> None:
        """Unmaps now, or when the last view is dropped."""
        self._view.release()
        with suppress(BufferError):
            self._memory.close()


class Arena(_Mapped):
    """The store's side. `format` it before use; `close` frees the memory once no client maps it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._fd = os.memfd_create("penstock-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            super().__init__(mmap.mmap(self._fd, size))
        except BaseException:
            os.close(self._fd)
            raise
        self.arena_id = os.urandom(ARENA_ID_BYTES)
        self._view[: len(_MAGIC)] = _MAGIC
        self._view[_ID] = self.arena_id
        self._layout = Layout(0, 0, 1)
        self._epochs = self._table(self._layout)

    @property
    def path(self) -> str:
        """The path by which a client of the same host opens the arena."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def layout(self) -> Layout:
        return self._layout

    def format(self, layout: Layout) -> None:
        """Changes the layout of the slots; no slot has a holder then."""
        self._epochs.release()
        self._layout = layout
        self._epochs = self._table(layout)
        self._view[layout.epochs_at : layout.slots_at] = bytes(layout.slots_at - layout.epochs_at)

    def set_epoch(self, slot: int, epoch: int) -> None:
        """Tells clients the epoch of the slot's holder; 0: none."""
        self._epochs[slot] = epoch

    def slots(self) -> memoryview:
        """All slots, writable. As for `block`."""
        return self._view[self._layout.slots_at : self._layout.offset(self._layout.slots)]

    def block(self, slot: int, length: int) -> memoryview:
        """The first `length` bytes of a slot, writable. The caller drops the view before the arena is closed."""
        start = self._layout.offset(slot)
        return self._view[start : start + length]

    def whole(self) -> memoryview:
        """All of it, slots and tables, writable. As for `block`."""
        return self._view[:]

    def populate(self, start: int, length: int) -> bool:
        """Has the kernel provide the pages of a range without changing them. False: it can't.

        Blocks for as long as the page faults would take (up to 4 s/GB on a virtual machine) and releases the GIL.
        """
        start -= start % _PAGE
        length = min(length, self.size - start)
        if length <= 0:
            return True
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory, start))
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        while madvise(address, length, _MADV_POPULATE_WRITE) != 0:
            if ctypes.get_errno() != errno.EINTR:
                return False
        return True

    def close(self) -> None:
        """Unmaps and closes. Mappings of clients stay good until they drop them."""
        self._epochs.release()
        self._unmap()
        os.close(self._fd)


class ArenaMap(_Mapped):
    """A client's mapping."""

    def __init__(self, path: str, size: int, arena_id: bytes, layout: Layout, *, writable: bool = True) -> None:
        """Raises MapError when `path` does not lead to the arena named `arena_id`."""
        mode, access = (os.O_RDWR, mmap.ACCESS_WRITE) if writable else (os.O_RDONLY, mmap.ACCESS_READ)
        try:
            fd = os.open(path, mode | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                _check_file(fd, size)
                super().__init__(mmap.mmap(fd, size, access=access))
            finally:
                os.close(fd)
        except OSError as error:
            raise MapError(f"the arena can't be mapped: {error.strerror}") from error
        if self._view[: len(_MAGIC)] != _MAGIC or self._view[_ID] != arena_id or layout.offset(layout.slots) > size:
            self._unmap()
            raise MapError("the path leads to another arena")
        self._layout = layout
        self._epochs = self._table(layout)

    def holds(self, offset: int, epoch: int) -> bool:
        """Whether the slot at `offset` is still in the hands of `epoch`."""
        return bool(self._epochs[self._layout.slot(offset)] == epoch)

    def block(self, offset: int, length: int) -> memoryview:
        """The bytes of a slot, writable if the mapping is. Raises ValueError when they are not those of one slot."""
        within = (offset - self._layout.slots_at) % self._layout.stride
        slot = self._layout.slot(offset)
        if within or not 0 <= slot < self._layout.slots or length > self._layout.stride:
            raise ValueError(f"{length} bytes at {offset} are not a slot")
        return self._view[offset : offset + length]

    def slots(self) -> memoryview:
        """All slots, writable if the mapping is."""
        return self._view[self._layout.slots_at : self._layout.offset(self._layout.slots)]

    def close(self) -> None:
        """Unmaps now, or with the last view that a reader still holds."""
        self._epochs.release()
        self._unmap()


def _check_file(fd: int, size: int) -> None:
    found = os.fstat(fd).st_size
    if found != size:
        raise MapError(f"the path leads to a file of {found} bytes instead of {size}")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise MapError("the path leads to a file that could change its size")
