"""An engine's page pool, as another process of the host reads it on the device.

The bytes are the pool's own. Which pages hold what, and for how long, is between the two processes: a page may be read
while its owner lends it, and not a moment longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.kv.device.memory import Device, DeviceFault, DeviceView


@dataclass(frozen=True, slots=True)
class PoolLease:
    """How to find a pool."""

    uuid: str
    """Of its device."""
    handle: bytes
    arena_bytes: int
    page_bytes: int
    pages: int
    """Including the first page, which has no owner."""


class LeasedPool:
    """A pool that is open in this process."""

    def __init__(self, device: Device, lease: PoolLease) -> None:
        """Raises DeviceFault when it lies on another device, can't be opened, or does not look like a pool."""
        if device.info.uuid != lease.uuid:
            raise DeviceFault(f"the pool is on device {lease.uuid}, not on {device.info.uuid}")
        if lease.page_bytes < 1 or lease.pages < 1 or lease.pages * lease.page_bytes > lease.arena_bytes:
            raise DeviceFault(f"{lease.pages} pages of {lease.page_bytes} bytes don't fit {lease.arena_bytes}")
        self._lease = lease
        self._opened = device.open(lease.handle, lease.arena_bytes)

    def page(self, number: int) -> DeviceView:
        """The bytes of a page, on the device. Raises ValueError for a page that does not exist."""
        if not 0 < number < self._lease.pages:
            raise ValueError(f"page {number} is not one of 1 to {self._lease.pages - 1}")
        return self._opened.view(number * self._lease.page_bytes, self._lease.page_bytes)

    def close(self) -> None:
        """Lets go of the memory, now or with the last view."""
        self._opened.close()
