"""From settings to a device tier, or to the reason why there can't be one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from penstock.kv.device.memory import Device, DeviceArena, DeviceFault, NoDevice
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.keeper import Keeper
from penstock.kvstore.tiers.device.tier import GpuTier
from penstock.runtime.config import ConfigError, format_size

OpenDevice = Callable[[int], Device]


@asynccontextmanager
async def open_gpu(keeper: Keeper, config: KvStoreConfig, open_device: OpenDevice) -> AsyncIterator[GpuTier | None]:
    """The device tier of `config`, as part of `keeper`, at work; None when none is wanted.

    Leave it when nothing is brought any more, and close the keeper afterwards. Raises ConfigError that says what
    would be possible.
    """
    if not config.gpu_bytes:
        yield None
        return
    device, arena = _allocate(config, open_device)
    tier = GpuTier(keeper, arena, device.info.uuid)
    keeper.suppliers.insert(0, tier)  # it is the nearest
    keeper.layers.append(tier)
    mover = asyncio.create_task(tier.run())  # awaited below
    try:
        yield tier
    finally:
        mover.cancel()
        await asyncio.wait([mover])
        tier.close()
        if not mover.cancelled() and (error := mover.exception()) is not None:
            raise error


def _allocate(config: KvStoreConfig, open_device: OpenDevice) -> tuple[Device, DeviceArena]:
    asked = format_size(config.gpu_bytes)
    try:
        device = open_device(config.gpu_device)
        free = device.free_bytes()
        if config.gpu_bytes > free:
            possible = format_size(free - free % (1 << 20))
            raise ConfigError("gpu_bytes", asked, f"device {config.gpu_device} has {possible} free; use less than that")
        return device, device.allocate(config.gpu_bytes)
    except NoDevice as error:
        raise ConfigError("gpu_bytes", asked, f"{error}; 0 does without") from error
    except DeviceFault as error:
        raise ConfigError("gpu_bytes", asked, f"device {config.gpu_device} can't give it: {error}") from error
