"""The disk tier of a keeper, with its mover: opened, run and closed as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict

from penstock.kv.bytes.arena import Arena
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.sessions import SessionTable
from penstock.kvstore.table.blocks import BlockPolicy
from penstock.kvstore.tiers.disk.mover import Mover
from penstock.kvstore.tiers.disk.tier import NvmeOptions, NvmeTier


class Disk:
    """Both halves. On one event loop."""

    def __init__(
        self,
        config: KvStoreConfig,
        arena: Arena,
        sessions: SessionTable,
        now: Callable[[], float],
        *,
        moved: Callable[[bytes], None],
        changed: Callable[[], None],
        policy: Callable[[], BlockPolicy],
    ) -> None:
        """`moved` hears of keys that come and go, `changed` of a change of everything. Raises ConfigError."""
        assert config.nvme_dir is not None
        self._flush_s = config.nvme_flush_s
        self._changed = changed
        options = NvmeOptions(
            directory=config.nvme_dir,
            total=config.nvme_bytes,
            per_s=config.nvme_write_bytes_per_s,
            per_day=config.nvme_write_bytes_per_day,
            direct=config.nvme_direct,
        )
        self.tier = NvmeTier(*(options, now), moved=moved, changed=self._ready, policy=policy, promises=config.promises)
        self.mover = Mover(self.tier, arena, sessions, now)

    def _ready(self) -> None:
        self._changed()
        self.mover.ready()

    async def open(self) -> None:
        """Finds what the last process left."""
        await self.tier.open()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.tier.run())
            tasks.create_task(self.mover.run())

    async def close(self) -> None:
        """Writes what has earned it, for a bounded time, and lets go of the directory. When `run` has ended."""
        try:
            await self.tier.follow()
            await self.mover.flush(self._flush_s)
        finally:
            await self.tier.close()

    def figures(self) -> dict[str, int]:
        """For metrics and the wire."""
        mover = {"pending": self.mover.pending, "waiting": self.mover.waiting, "prefetched": self.mover.prefetched}
        return asdict(self.tier.stats()) | mover
