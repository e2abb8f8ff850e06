"""Page memory as one arena that other processes of the host can open by CUDA IPC.

The store's device tier opens it as it opens any arena (see penstock.kv.device): it sees each page as a view on the
device, and what it copies from there need not pass through host memory.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from penstock.kv.device.leased import PoolLease
from penstock.kv.device.memory import Device, DeviceArena, DeviceFault

_log = logging.getLogger(__name__)


class PoolArena:
    """One allocation on one device, which other processes can open."""

    def __init__(self, device: Device, size: int) -> None:
        """The memory begins as zeros. Raises DeviceFault."""
        self._arena: DeviceArena = device.allocate(size)
        self._uuid = device.info.uuid
        self._size = size
        self.bytes: Tensor = from_dlpack(self._arena.view(0, size))
        """[size] uint8; keeps the memory mapped."""
        self.bytes.zero_()

    def lease(self, page_bytes: int, pages: int) -> PoolLease:
        """What another process needs in order to read the pages."""
        return PoolLease(self._uuid, self._arena.handle, self._size, page_bytes, pages)


def open_arena(size: int, device: torch.device) -> PoolArena | None:
    """Opens an arena on a CUDA device; returns None when cupy is missing or the device can't share its memory."""
    from penstock.kv.device.cuda import open_cuda

    try:
        return PoolArena(open_cuda(device.index or 0), size)
    except DeviceFault as fault:
        _log.info("other processes can't open the KV pages: %s", fault)
        return None
