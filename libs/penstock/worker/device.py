"""The device on which an engine can read the store's blocks where they lie."""

from __future__ import annotations

import structlog

from penstock.kv.device.cuda import open_cuda
from penstock.kv.device.memory import Device, DeviceFault


def device_of(name: str) -> Device | None:
    """The device that torch calls `name`; None for the CPU, and where cupy can't reach it: then blocks come through
    host memory."""
    kind, _, index = name.partition(":")
    if kind != "cuda":
        return None
    try:
        return open_cuda(int(index or 0))
    except DeviceFault as fault:
        structlog.get_logger("penstock.worker").warning("blocks come through host memory", reason=str(fault))
        return None
