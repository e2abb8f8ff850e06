"""A stand-in for a device, for tests: its memory is a memfd, and its streams are threads.

It keeps what makes a device hard to use right. A copy happens when its turn comes, not when it is submitted, so it
reads what the host memory holds *then*; the two directions race; a copy can stop half way, fail, or write a wrong
byte; and the whole device can be lost. `TwinSwitch` makes each of these happen when a test says so.
"""

from __future__ import annotations

import mmap
import os
import queue
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from penstock.kv.bytes.copying import copy_bytes
from penstock.kv.device.memory import HANDLE_BYTES, Copy, DeviceFault, DeviceInfo, NoDevice, check_copy, check_range

_TOTAL_BYTES = 1 << 30
_HEAD_BYTES = mmap.PAGESIZE
_HANDLE = struct.Struct("<4sIIQ16s")
_MAGIC = b"twin"


class TwinSwitch:
    """Holds, fails or harms the copies of a twin, or loses the device, when a test says so. Thread-safe."""

    def __init__(self) -> None:
        self.piece_bytes = 1 << 62
        """Copies are made in pieces of this size; between two of them others see the halves of a block."""
        self.pieces = 0
        """Copied so far."""
        self._changed = threading.Condition()
        self._permits: int | None = None
        self._stalled = 0
        self._failures = 0
        self._flips = 0
        self._harmed = 0
        self._lost = False

    def hold(self, after: int = 0) -> None:
        """Lets `after` more pieces pass and then nothing, until `release`."""
        with self._changed:
            self._permits = after

    def release(self) -> None:
        """Lets all streams go on."""
        with self._changed:
            self._permits = None
            self._changed.notify_all()

    def stalled(self, streams: int = 1) -> bool:
        """Whether so many streams wait for `release`."""
        with self._changed:
            return self._stalled >= streams

    def fail(self, transfers: int = 1) -> None:
        """The next transfers fail, before their first byte."""
        with self._changed:
            self._failures += transfers

    def flip(self, transfers: int = 1) -> None:
        """The next transfers arrive with one wrong bit."""
        with self._changed:
            self._flips += transfers

    def lose(self) -> None:
        """The device is gone: every copy fails from now on."""
        with self._changed:
            self._lost = True

    def check(self) -> None:
        """Raises DeviceFault when the device is lost."""
        if self._lost:
            raise DeviceFault("the device is lost", lost=True)

    def begin(self) -> int | None:
        """A transfer begins; which of its bytes will be harmed. Raises DeviceFault when it is to fail."""
        with self._changed:
            self.check()
            if self._failures:
                self._failures -= 1
                raise DeviceFault("the copy failed")
            if not self._flips:
                return None
            self._flips -= 1
            self._harmed += 1  # never the same byte twice: two flips don't make a right
            return self._harmed

    def pass_piece(self) -> None:
        """Returns when a piece may be copied."""
        with self._changed:
            self._stalled += 1
            self._changed.wait_for(lambda: self._permits is None or self._permits > 0)
            self._stalled -= 1
            if self._permits is not None:
                self._permits -= 1
            self.pieces += 1


class _Transfer:
    def __init__(self) -> None:
        self._over = threading.Event()
        self._fault: DeviceFault | None = None

    def finish(self, fault: DeviceFault | None) -> None:
        self._fault = fault
        self._over.set()

    def done(self) -> bool:
        """Whether the stream has finished with the copies. Raises the DeviceFault that ended them."""
        if self._over.is_set() and self._fault is not None:
            raise self._fault
        return self._over.is_set()

    def wait(self) -> None:
        """Blocks until the stream has finished with the copies. Raises the DeviceFault that ended them."""
        self._over.wait()
        self.done()


class _Stream:
    """Copies in the order of submission, in a thread of its own."""

    def __init__(self, name: str, switch: TwinSwitch) -> None:
        self._switch = switch
        self._queue: queue.SimpleQueue[tuple[_Transfer, list[tuple[memoryview, memoryview]]] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, copies: list[tuple[memoryview, memoryview]]) -> _Transfer:
        """Pairs of target and source."""
        self._switch.check()
        transfer = _Transfer()
        self._queue.put((transfer, copies))
        return transfer

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            transfer, copies = item
            fault = None
            try:
                self._copy(copies)
            except DeviceFault as error:
                fault = error
            del item, copies
            transfer.finish(fault)

    def _copy(self, copies: list[tuple[memoryview, memoryview]]) -> None:
        harmed = self._switch.begin()
        for target, source in copies:
            step = min(self._switch.piece_bytes, source.nbytes)
            for start in range(0, source.nbytes, step):
                self._switch.pass_piece()
                self._switch.check()
                copy_bytes(target[start : start + step], source[start : start + step])
        if harmed is not None:
            copies[0][0][harmed % copies[0][0].nbytes] ^= 1

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class TwinView:
    """Bytes of a twin's arena as an array of uint8 on the CPU, uncopied. It keeps the memory mapped."""

    def __init__(self, memory: memoryview) -> None:
        self.nbytes = memory.nbytes
        self._memory = memory

    def _array(self) -> Any:
        import numpy  # not needed by a store, and there wherever somebody takes arrays

        return numpy.frombuffer(self._memory, dtype=numpy.uint8)

    def __dlpack__(self, **options: Any) -> Any:
        return self._array().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._array().__dlpack_device__()
        return device


class OpenedTwin:
    """An arena of a twin, mapped from the memfd of its owner. The owner may be this process."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._mapped = mmap.mmap(fd, _HEAD_BYTES + size)
        self._memory = memoryview(self._mapped)[_HEAD_BYTES:]

    def view(self, offset: int, length: int) -> TwinView:
        """Returns a range of the arena without a copy. Raises ValueError when it is not inside."""
        check_range(self.size, offset, length)
        return TwinView(self._memory[offset : offset + length])

    def head(self) -> bytes:
        """Returns the 16 random bytes that tell this arena from any other."""
        return self._mapped[:16]

    def close(self) -> None:
        """Unmaps the memory, now or with the last view of it."""
        self._memory.release()
        with suppress(BufferError):  # somebody holds a view
            self._mapped.close()


class TwinArena(OpenedTwin):
    """The memfd that stands for a device's memory, with a thread for each direction of copies. The owner closes it."""

    def __init__(self, size: int, switch: TwinSwitch, given_back: Callable[[], None]) -> None:
        self._given_back = given_back
        self._fd = os.memfd_create("penstock-twin", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, _HEAD_BYTES + size)
            super().__init__(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        self._switch = switch
        self._mapped[:16] = os.urandom(16)
        self.handle = _HANDLE.pack(_MAGIC, os.getpid(), self._fd, size, self.head()).ljust(HANDLE_BYTES, b"\0")
        self.registered: list[int] = []
        """Sizes of what was registered."""
        self._up, self._down = _Stream("twin-up", switch), _Stream("twin-down", switch)

    def _range(self, offset: int, host: memoryview) -> memoryview:
        check_copy(self.size, offset, host)
        return self._memory[offset : offset + host.nbytes]

    def upload(self, copies: Sequence[Copy]) -> _Transfer:
        """Queues copies to the arena, which read host memory when their turn comes. Raises ValueError, DeviceFault."""
        return self._up.submit([(self._range(offset, host), host.cast("B")) for offset, host in copies])

    def download(self, copies: Sequence[Copy]) -> _Transfer:
        """Queues copies to host memory, which change it when their turn comes. Raises ValueError, DeviceFault."""
        return self._down.submit([(host.cast("B"), self._range(offset, host)) for offset, host in copies])

    def register(self, memory: memoryview) -> bool:
        """Records the size for tests; there is no memory to pin."""
        self.registered.append(memory.nbytes)
        return True

    def pinned(self, size: int) -> memoryview:
        """Returns ordinary memory: a twin has no use for pinned memory."""
        return memoryview(bytearray(size))

    def close(self) -> None:
        """Finishes the submitted copies, as a device does, then frees the memory."""
        self._up.close()
        self._down.close()
        super().close()
        os.close(self._fd)
        self._given_back()


class TwinDevice:
    """A device made of host memory. All twins of one index are one device, in whatever process."""

    def __init__(self, index: int = 0, switch: TwinSwitch | None = None, total_bytes: int = _TOTAL_BYTES) -> None:
        """Raises NoDevice: there is one twin, number 0."""
        if index != 0:
            raise NoDevice(f"there is no device {index}; 1 is visible, the first is 0")
        self.info = DeviceInfo(index, f"twin-{index}", "twin", total_bytes)
        self.switch = switch or TwinSwitch()
        self._taken = 0

    def free_bytes(self) -> int:
        """Subtracts the twin's own arenas from its total. Raises DeviceFault when the device is lost."""
        self.switch.check()
        return self.info.total_bytes - self._taken

    def allocate(self, size: int) -> TwinArena:
        """Makes an arena, whose bytes are free again once it is closed. Raises DeviceFault when too few are free."""
        if size > self.free_bytes():
            raise DeviceFault(f"{size} bytes asked for, {self.free_bytes()} are free")
        self._taken += size

        def given_back() -> None:
            self._taken -= size

        return TwinArena(size, self.switch, given_back)

    def open(self, handle: bytes, size: int) -> OpenedTwin:
        """Maps a twin's arena through its owner's /proc entry. Raises DeviceFault when the arena is gone."""
        self.switch.check()
        magic, pid, fd, whole, head = _HANDLE.unpack(handle[: _HANDLE.size].ljust(_HANDLE.size, b"\0"))
        if magic != _MAGIC or whole != size:
            raise DeviceFault("this is not the handle of such an arena")
        try:
            file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(file).st_size != _HEAD_BYTES + size:
                    raise DeviceFault("the handle's arena is gone")
                opened = OpenedTwin(file, size)
            finally:
                os.close(file)
        except OSError as error:
            raise DeviceFault(f"the arena can't be opened: {error.strerror}") from error
        if opened.head() != head:
            opened.close()
            raise DeviceFault("the handle's arena is gone")
        return opened
