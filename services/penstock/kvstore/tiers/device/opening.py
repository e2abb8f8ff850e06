"""From settings to a device tier at work, or to the reason why there can't be one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from penstock.kv.device.memory import Device, DeviceArena, DeviceFault, NoDevice
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.sessions import SessionTable
from penstock.kvstore.tiers.base import Rules
from penstock.kvstore.tiers.device.form import DeviceBlocks
from penstock.kvstore.tiers.device.mover import DeviceMover
from penstock.kvstore.tiers.device.tier import DeviceTier
from penstock.kvstore.tiers.host import HostTier
from penstock.kvstore.tiers.tiers import Tiers
from penstock.runtime.config import ConfigError, format_size
from penstock.runtime.tasks import beside

OpenDevice = Callable[[int], Device]


@asynccontextmanager
async def open_device_tier(
    config: KvStoreConfig,
    host: HostTier,
    sessions: SessionTable,
    *,
    tiers: Tiers,
    rules: Rules,
    open_device: OpenDevice,
) -> AsyncIterator[DeviceTier]:
    """The device tier of `config` as one of `tiers`, at work. Raises ConfigError that tells what would work.

    Leave it when no block is brought any more, and before host memory.
    """
    device, arena = _allocate(config, open_device)
    blocks = DeviceBlocks(arena, device.info.uuid, tiers, rules)
    try:
        mover = DeviceMover(blocks, host, sessions, tiers=tiers, rules=rules)
        tier = DeviceTier(blocks, mover, rules)
        with tiers.keeping(tier), tiers.followed_by(tier), host.uses_heard_by(mover.used):
            async with beside(mover.run, name="device mover", on_failure="restart", failed=rules.failed):
                yield tier
    finally:
        blocks.close()


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
