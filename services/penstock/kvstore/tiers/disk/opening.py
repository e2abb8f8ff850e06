"""The disk as a tier: its directory, and what is copied to it and brought back before it is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial

from penstock.kv.hint import ReturnHint
from penstock.kv.spec import KvSpec
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.sessions import SessionTable
from penstock.kvstore.table.blocks import Block, Lease, TierKind
from penstock.kvstore.table.promises import Grant
from penstock.kvstore.tiers.base import Room, Rules
from penstock.kvstore.tiers.disk.mover import DiskMover
from penstock.kvstore.tiers.disk.tier import NvmeOptions, NvmeTier
from penstock.kvstore.tiers.host import HostTier
from penstock.kvstore.tiers.tiers import Tiers
from penstock.runtime.tasks import beside


class DiskTier:
    """Tier: the files of `NvmeTier`, and the mover beside them. Made by `open_disk`; used from its event loop."""

    kind = TierKind.NVME

    def __init__(self, files: NvmeTier, mover: DiskMover, now: Callable[[], float]) -> None:
        self.files = files
        self.mover = mover
        self._now = now

    @property
    def spec(self) -> KvSpec | None:
        """See Tier: before the first client that of the last process, when its blocks are there."""
        return self.files.spec

    @property
    def busy(self) -> bool:
        """See Tier: blocks of another spec are left alone, and written to their end."""
        return False

    def format_for(self, spec: KvSpec) -> None:
        """See Tier. What is on the disk of another spec stays there."""
        self.files.use(spec)
        self.mover.forget()

    async def settled(self, limit_s: float) -> None:
        """See Tier: when the headers have been read."""
        await self.files.settled(limit_s)

    def has_blocks(self, keys: Sequence[bytes]) -> int:
        """See Supplier."""
        return self.files.has_blocks(keys)

    async def bring_blocks(self, keys: Sequence[bytes], room: Room, until: float) -> int:
        """See Supplier."""
        return await self.files.bring_blocks(keys, room, until)

    def find_block(self, key: bytes) -> Block | None:
        """See Tier."""
        return self.files.table.find(key)

    def stored_keys(self) -> Iterable[bytes]:
        """See Tier."""
        return self.files.table.keys()

    def promise_blocks(self, keys: Sequence[bytes], seconds: float, namespace: bytes) -> Grant:
        """See Tier: those in memory are written first."""
        grant = self.files.table.promise(keys, seconds, namespace, self._now())
        self.mover.promised(keys[: grant.blocks])
        return grant

    def renew_promises(self, keys: Sequence[bytes]) -> None:
        """See Tier."""
        self.files.table.renew(keys, self._now())

    def expect_session(self, session: str, hint: ReturnHint) -> None:
        """See Tier."""
        self.files.table.expect_session(session, hint)

    def blocks_leased(self, lease: Lease, keys: Sequence[bytes]) -> None:
        """See Tier."""
        self.mover.leased(lease)

    def figures(self) -> Mapping[str, int]:
        """See Tier: those of NvmeStats in the proto."""
        mover = {"pending": self.mover.pending, "waiting": self.mover.waiting, "prefetched": self.mover.prefetched}
        return asdict(self.files.stats()) | mover


@asynccontextmanager
async def open_disk(
    config: KvStoreConfig, host: HostTier, sessions: SessionTable, *, tiers: Tiers, rules: Rules
) -> AsyncIterator[DiskTier]:
    """The disk tier of `config` as one of `tiers`, at work. Raises ConfigError.

    At the end it writes what has earned it, for a bounded time. Leave it when nothing is brought any more, and before
    host memory.
    """
    assert config.nvme_dir is not None
    ready = asyncio.Event()

    def changed() -> None:
        tiers.hub.restart()
        ready.set()

    options = NvmeOptions(
        directory=config.nvme_dir,
        total=config.nvme_bytes,
        per_s=config.nvme_write_bytes_per_s,
        per_day=config.nvme_write_bytes_per_day,
        direct=config.nvme_direct,
    )
    files = NvmeTier(
        options,
        rules.now,
        moved=partial(tiers.moved, TierKind.NVME),
        changed=changed,
        policy=rules.policy,
        promises=rules.promises,
    )
    mover = DiskMover(files, host, sessions, rules.now, wake=ready)
    disk = DiskTier(files, mover, rules.now)
    try:
        await files.open()
        with tiers.joined(disk), host.watched_by(mover), sessions.heard_by(lambda _: ready.set()):
            try:
                async with (
                    beside(files.run, name="disk", on_failure="restart", failed=rules.failed) as following,
                    beside(mover.run, name="disk mover", on_failure="restart", failed=rules.failed),
                ):
                    try:
                        yield disk
                    finally:
                        files.stop()
                        await following.ended()
            finally:
                await files.follow()
                await mover.flush(config.nvme_flush_s)
    finally:
        await files.close()
