"""The disk as a tier: its files, and the mover that writes blocks and brings them back ahead of their use."""

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
from penstock.kvstore.tiers.disk.options import NvmeOptions
from penstock.kvstore.tiers.disk.tier import NvmeTier
from penstock.kvstore.tiers.host import HostTier
from penstock.kvstore.tiers.tiers import Tiers
from penstock.runtime.tasks import beside


class DiskTier:
    """Tier: the files of `NvmeTier`, and their mover. Made by `open_disk`; used from its event loop."""

    kind = TierKind.NVME

    def __init__(self, files: NvmeTier, mover: DiskMover, now: Callable[[], float]) -> None:
        self.files = files
        self.mover = mover
        self._now = now

    @property
    def spec(self) -> KvSpec | None:
        """The spec of the open space: before the first client that of the last process. None: no space is open."""
        return self.files.spec

    @property
    def busy(self) -> bool:
        """Always False: a new spec leaves old blocks where they are, and writes under way run to their end."""
        return False

    def format_for(self, spec: KvSpec) -> None:
        """Opens the space of `spec` in the background. Blocks of other specs stay on the disk."""
        self.files.use(spec)
        self.mover.forget()

    async def settled(self, limit_s: float) -> None:
        """Returns when the headers of the space have been read or it failed to open, at the latest after `limit_s`."""
        await self.files.settled(limit_s)

    def has_blocks(self, keys: Sequence[bytes]) -> int:
        """Counts the leading keys that are on the disk; 0 while reading is suspended after a failure."""
        return self.files.has_blocks(keys)

    async def bring_blocks(self, keys: Sequence[bytes], room: Room, until: float) -> int:
        """Reads leading blocks from the disk into `room`, verified; returns how many are stored."""
        return await self.files.bring_blocks(keys, room, until)

    def find_block(self, key: bytes) -> Block | None:
        """Finds a block in the table of the disk; None: it is not there."""
        return self.files.table.find(key)

    def stored_keys(self) -> Iterable[bytes]:
        """Returns a live view of the keys on the disk."""
        return self.files.table.keys()

    def promise_blocks(self, keys: Sequence[bytes], seconds: float, namespace: bytes) -> Grant:
        """Promises blocks on the disk, and has those that are only in memory written first."""
        grant = self.files.table.promise(keys, seconds, namespace, self._now())
        self.mover.promised(keys[: grant.blocks])
        return grant

    def renew_promises(self, keys: Sequence[bytes]) -> None:
        """Renews what the disk has promised of these blocks."""
        self.files.table.renew(keys, self._now())

    def expect_session(self, session: str, hint: ReturnHint) -> None:
        """Passes the hint to the eviction policy of the disk."""
        self.files.table.expect_session(session, hint)

    def blocks_leased(self, lease: Lease, keys: Sequence[bytes]) -> None:
        """Tells the mover of the use, which may earn the blocks a place on the disk. Does no I/O."""
        self.mover.leased(lease)

    def figures(self) -> Mapping[str, int]:
        """Returns the fields of NvmeStats in the proto: those of the files, and the mover's queues."""
        mover = {"pending": self.mover.pending, "waiting": self.mover.waiting, "prefetched": self.mover.prefetched}
        return asdict(self.files.stats()) | mover


@asynccontextmanager
async def open_disk(
    config: KvStoreConfig, host: HostTier, sessions: SessionTable, *, tiers: Tiers, rules: Rules
) -> AsyncIterator[DiskTier]:
    """The disk tier of `config` as one of `tiers`, at work. Raises ConfigError.

    At the end it writes the blocks that earned it, for a bounded time. Leave it when no block is brought any more,
    and before host memory.
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
