"""A store's blocks on a device, as one of its clients reads them there.

The views are the store's memory itself. They are right as long as `still_valid` says so *after* the copy or the
kernel that reads them has finished: on a device that is when its stream was waited for, not when it was submitted.
What lies there was checked when it arrived (see the store's device tier), and is not checked once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.kv.device.epochs import EpochMap
from penstock.kv.device.memory import Device, DeviceFault, DeviceView, OpenedArena
from penstock.v1 import kvstore_pb2


class DeviceMap:
    """The store's arena, opened in this process, and the epochs of its slots."""

    def __init__(self, device: Device, place: kvstore_pb2.DeviceMemory, block_bytes: int) -> None:
        """Raises DeviceFault or MapError when it can't be opened, or does not look like such an arena."""
        if not 0 < block_bytes <= place.slot_stride or place.slots * place.slot_stride > place.arena_bytes:
            raise DeviceFault(f"{place.slots} slots of {place.slot_stride} bytes don't fit {place.arena_bytes}")
        self._stride, self._slots, self._block_bytes = place.slot_stride, place.slots, block_bytes
        self._epochs = EpochMap(place.epochs_path, place.epochs_id, place.slots)
        try:
            self._opened: OpenedArena = device.open(place.handle, place.arena_bytes)
        except BaseException:
            self._epochs.close()
            raise

    def view(self, offset: int) -> DeviceView:
        """The block at `offset`. Raises ValueError when no slot begins there."""
        if offset % self._stride or not 0 <= offset // self._stride < self._slots:
            raise ValueError(f"no slot begins at {offset}")
        return self._opened.view(offset, self._block_bytes)

    def holds(self, offset: int, epoch: int) -> bool:
        """Whether the slot at `offset` is still in the hands of `epoch`."""
        return self._epochs.holds(offset // self._stride, epoch)

    def close(self) -> None:
        """Lets go of the memory, now or with the last view."""
        self._opened.close()
        self._epochs.close()


@dataclass(slots=True, eq=False)
class OnDevice:
    """The leading blocks of a lease that lie on the device."""

    views: list[DeviceView] = field(default_factory=list)
    _offsets: Sequence[int] = ()
    _epochs: Sequence[int] = ()
    _map: DeviceMap | None = None

    @classmethod
    def of(cls, mapped: DeviceMap | None, lease: kvstore_pb2.DeviceLease, asked: int) -> OnDevice:
        """The blocks that a store leased of the `asked` ones. Raises ValueError when the answer is not possible."""
        count = len(lease.offsets)
        if not count:
            return cls()
        if mapped is None or count > asked or len(lease.epochs) != count:
            raise ValueError(f"{count} blocks on a device for {asked} that were asked for")
        return cls([mapped.view(offset) for offset in lease.offsets], lease.offsets, lease.epochs, mapped)

    def still_valid(self) -> bool:
        """False: a pin has lapsed and a slot changed hands."""
        return self._map is None or all(map(self._map.holds, self._offsets, self._epochs))
