"""The slab files of one spec: slots by number, read and written in threads, past the page cache where possible."""

from __future__ import annotations

import ctypes
import errno
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.kv.bytes.checksum import checksum
from penstock.kv.bytes.copying import copy_bytes
from penstock.kvstore.tiers.disk.files import Files, pages, read_all, write_all
from penstock.kvstore.tiers.disk.format import PAGE, Drop, Header, pack, parse, slot_bytes

RUN_BYTES = 4 << 20
"""Most bytes of one call: a get that comes meanwhile does not wait long."""
_MOST_SLOTS = 256
_NAME = re.compile(r"slab-(\d{6})\.blocks")


@dataclass(frozen=True, slots=True)
class SlabShape:
    """How a directory's slabs are cut. Written down in its manifest."""

    block_bytes: int
    slab_slots: int

    @property
    def slot_bytes(self) -> int:
        """From one slot to the next."""
        return slot_bytes(self.block_bytes)

    @property
    def slab_bytes(self) -> int:
        """Of every file."""
        return self.slab_slots * self.slot_bytes

    @property
    def run_slots(self) -> int:
        """Slots that one call reads or writes, at most."""
        return max(1, min(_MOST_SLOTS, RUN_BYTES // self.slot_bytes))

    def runs(self, slots: Sequence[int]) -> Iterator[range]:
        """Cuts indices into `slots` into runs of slots that follow each other in one slab."""
        start = 0
        for index in range(1, len(slots) + 1):
            if (
                index == len(slots)
                or slots[index] != slots[index - 1] + 1
                or slots[index] % self.slab_slots == 0
                or index - start == self.run_slots
            ):
                yield range(start, index)
                start = index


class Slabs:
    """All calls block, and may come from several threads as long as no two of them write into one slot."""

    def __init__(self, directory: Path, shape: SlabShape, mark: bytes, files: Files, *, direct: bool) -> None:
        """`mark` is the fingerprint of the spec; `direct`: leave the page cache out where the file system can."""
        self.shape = shape
        self.direct = direct
        """Whether the page cache is left out. Known when a slab was opened."""
        self._directory = directory
        self._mark = mark
        self._files = files
        self._fds: dict[int, int] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    # -- files

    def existing(self) -> list[int]:
        """Numbers of the slabs that are on the disk."""
        found = (_NAME.fullmatch(path.name) for path in self._directory.iterdir())
        return sorted(int(match[1]) for match in found if match is not None)

    def open(self, slab: int) -> int:
        """Opens a slab, with all its bytes set aside; returns how many it had before."""
        with self._lock:
            fd, size = self._open(slab)
            self._fds[slab] = fd
        return size

    def _open(self, slab: int) -> tuple[int, int]:
        assert slab not in self._fds
        try:
            return self._sized(slab, direct=self.direct)
        except OSError as error:
            if not self.direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        opened = self._sized(slab, direct=False)
        self.direct = False
        return opened

    def _sized(self, slab: int, *, direct: bool) -> tuple[int, int]:
        fd = self._files.open(self.path(slab), direct=direct)
        try:
            size = self._files.size(fd)
            if size < self.shape.slab_bytes:
                self._files.allocate(fd, self.shape.slab_bytes)
            if direct:  # some file systems open such files and then can't read them
                read_all(self._files, fd, [self._scratch(PAGE)], 0)
            return fd, size
        except BaseException:
            self._files.close(fd)
            raise

    def is_open(self, slot: int) -> bool:
        """Whether the slab of a slot is there."""
        return slot // self.shape.slab_slots in self._fds

    def path(self, slab: int) -> Path:
        """Of a slab's file."""
        return self._directory / f"slab-{slab:06}.blocks"

    def sync(self) -> None:
        """Returns when all that was written would survive a loss of power."""
        for fd in list(self._fds.values()):
            self._files.sync(fd)

    def close(self) -> None:
        """Closes all files. When no call is under way."""
        while self._fds:
            with suppress(OSError):
                self._files.close(self._fds.popitem()[1])

    # -- blocks

    def read(self, slots: Sequence[int], targets: Sequence[memoryview]) -> list[Header | Drop]:
        """Reads one run of slots into `targets`, each of the block's size; says of each what it is.

        A header means that the block is whole and is in its target; whether it is the one that was wanted is for
        the caller to see. Raises OSError.
        """
        shape, count = self.shape, len(slots)
        scratch = self._scratch(count * shape.slot_bytes)
        buffers, places = [], []
        for index, target in enumerate(targets):
            own = scratch[index * shape.slot_bytes : (index + 1) * shape.slot_bytes]
            straight = self._is_straight(target)
            places.append(target if straight else own[PAGE : PAGE + shape.block_bytes])
            buffers += [own[:PAGE], target] if straight else [own]
        fd, at = self._place(slots[0])
        read_all(self._files, fd, buffers, at)
        found: list[Header | Drop] = []
        for index, (target, place) in enumerate(zip(targets, places, strict=True)):
            header = parse(scratch[index * shape.slot_bytes :][:PAGE], self._mark, shape.block_bytes)
            if isinstance(header, Header) and checksum(place) == header.checksum:
                if place is not target:
                    copy_bytes(target, place)
                found.append(header)
            else:
                found.append(header if isinstance(header, Drop) else Drop.CORRUPT)
        return found

    def write(self, slots: Sequence[int], headers: Sequence[Header], blocks: Sequence[memoryview]) -> None:
        """Writes one run of slots: blocks with empty headers first, then the headers. Raises OSError."""
        shape = self.shape
        scratch = self._scratch(len(slots) * shape.slot_bytes)
        buffers = []
        for index, block in enumerate(blocks):
            own = scratch[index * shape.slot_bytes : (index + 1) * shape.slot_bytes]
            own[:PAGE] = bytes(PAGE)
            if self._is_straight(block):
                buffers += [own[:PAGE], block]
            else:
                copy_bytes(own[PAGE : PAGE + shape.block_bytes], block)
                own[PAGE + shape.block_bytes :] = bytes(len(own) - PAGE - shape.block_bytes)
                buffers.append(own)
        fd, at = self._place(slots[0])
        write_all(self._files, fd, buffers, at)
        for index, header in enumerate(headers):
            scratch[:PAGE] = pack(header, self._mark)
            write_all(self._files, fd, [scratch[:PAGE]], at + index * shape.slot_bytes)

    def erase(self, slot: int) -> None:
        """Empties a slot. Raises OSError."""
        scratch = self._scratch(PAGE)
        scratch[:] = bytes(PAGE)
        fd, at = self._place(slot)
        write_all(self._files, fd, [scratch], at)

    def header(self, slot: int) -> Header | Drop | None:
        """Reads the header of a slot, without its block. Raises OSError."""
        scratch = self._scratch(PAGE)
        fd, at = self._place(slot)
        read_all(self._files, fd, [scratch], at)
        return parse(scratch, self._mark, self.shape.block_bytes)

    def _place(self, slot: int) -> tuple[int, int]:
        slab, index = divmod(slot, self.shape.slab_slots)
        return self._fds[slab], index * self.shape.slot_bytes

    def _scratch(self, size: int) -> memoryview:
        """A buffer of this thread, used again by every call."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.nbytes < size:
            buffer = self._local.buffer = pages(size)
        return buffer[:size]

    def _is_straight(self, view: memoryview) -> bool:
        """Whether bytes can go between the disk and `view` itself."""
        if view.nbytes % PAGE or view.readonly:
            return False
        return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE == 0
