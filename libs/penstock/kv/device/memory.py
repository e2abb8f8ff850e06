"""The operations on a device's memory that the store and its clients need. Plain contracts; see `cuda` and `twin`.

A store takes one arena of fixed size and never more, so that it does not fight the allocator of an engine on the
same device. Copies are asynchronous: `upload` and `download` return at once, and the bytes move later, in the order
of submission within each direction and in no order between the two. Host memory of a copy stays unchanged (upload)
or unread (download) until its transfer is done, and the same holds for the device's side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

HANDLE_BYTES = 64
"""Of an arena's handle, by which another process of the host opens it."""


class DeviceFault(Exception):
    """The device refused, or a copy failed: the source is unchanged, and the target is undefined."""

    def __init__(self, message: str, *, lost: bool = False) -> None:
        """`lost`: nothing will work on this device any more, as far as this process is concerned."""
        super().__init__(message)
        self.lost = lost


class NoDevice(DeviceFault):
    """The device does not exist, or can't be reached. The message tells what would work."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device as all processes of the host see it."""

    index: int
    """Its number in this process; another process may count differently."""
    uuid: str
    """Its name, the same in every process."""
    name: str
    total_bytes: int


Copy = tuple[int, memoryview]
"""An offset in the arena, and contiguous, writable host memory: what is copied is as long as the latter."""


class Transfer(Protocol):
    """Copies that were submitted together."""

    def done(self) -> bool:
        """Whether all of it is copied. Raises DeviceFault when that will not happen."""
        ...

    def wait(self) -> None:
        """Blocks, without the GIL, until it is done. Raises DeviceFault."""


class DeviceView(Protocol):
    """Bytes on a device as an array of uint8, for `torch.from_dlpack` and its like: no copy is made.

    It keeps the memory mapped, but not its content: only a lease pins that.
    """

    nbytes: int

    def __dlpack__(self, **options: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class OpenedArena(Protocol):
    """An arena that another process owns."""

    size: int

    def view(self, offset: int, length: int) -> DeviceView:
        """A range of the arena. Raises ValueError when it is not inside."""
        ...

    def close(self) -> None:
        """Lets go of the memory, now or with the last view of it."""


class DeviceArena(OpenedArena, Protocol):
    """The memory that one process owns on one device."""

    handle: bytes
    """By this, `Device.open` of another process of the host finds it."""

    def upload(self, copies: Sequence[Copy]) -> Transfer:
        """Host to device. Raises DeviceFault when it can't even be submitted, ValueError outside of the arena.

        May block for as long as the copies take when the host memory is not registered: call it in a thread.
        """
        ...

    def download(self, copies: Sequence[Copy]) -> Transfer:
        """Device to host; as `upload`."""
        ...

    def register(self, memory: memoryview) -> bool:
        """Pins host memory, so that copies from and to it run at full speed and in the background; False: it can't.

        Takes the time to fault its pages in: call it in a thread. Lasts until `close`.
        """
        ...

    def pinned(self, size: int) -> memoryview:
        """New host memory that is pinned where that is possible."""
        ...


class Device(Protocol):
    """One accelerator, as this process reaches it."""

    @property
    def info(self) -> DeviceInfo: ...

    def free_bytes(self) -> int:
        """The bytes that `allocate` could take now. Raises DeviceFault."""
        ...

    def allocate(self, size: int) -> DeviceArena:
        """All memory of it that this process will use. Raises DeviceFault when there is not as much."""
        ...

    def open(self, handle: bytes, size: int) -> OpenedArena:
        """The arena of another process of this host, on this device. Raises DeviceFault."""
        ...


def check_range(size: int, offset: int, length: int) -> None:
    """Raises ValueError unless the range lies inside an arena of `size`."""
    if offset < 0 or length < 0 or offset + length > size:
        raise ValueError(f"{length} bytes at {offset} are outside of an arena of {size}")


def check_copy(size: int, offset: int, host: memoryview) -> None:
    """Raises ValueError unless the copy is possible in an arena of `size`."""
    check_range(size, offset, host.nbytes)
    if host.readonly or not host.contiguous or not host.nbytes:
        raise ValueError("the host memory of a copy is writable, contiguous, and not empty")
