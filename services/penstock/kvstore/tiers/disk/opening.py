"""From settings to a disk at work: a tier of the store whenever the space of the spec in use is open.

Another spec's space opens in the background, which takes long when many headers are to be read. Until then the store
has no such tier, and serves from the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from penstock.kv.spec import KvSpec
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.sessions import SessionTable
from penstock.kvstore.table.blocks import TierKind
from penstock.kvstore.tiers.base import Rules, added
from penstock.kvstore.tiers.disk.blocks import DiskBlocks
from penstock.kvstore.tiers.disk.condition import Condition
from penstock.kvstore.tiers.disk.movement import Learned
from penstock.kvstore.tiers.disk.mover import DiskMover
from penstock.kvstore.tiers.disk.options import NvmeOptions
from penstock.kvstore.tiers.disk.spaces import Spaces
from penstock.kvstore.tiers.disk.tier import DiskTier
from penstock.kvstore.tiers.host import HostTier
from penstock.kvstore.tiers.tiers import Tiers
from penstock.runtime.config import ConfigError
from penstock.runtime.tasks import beside

_SAVE_S = 30.0
_RETRY_S = 5.0


@dataclass(frozen=True, eq=False)
class _Wanted:
    """The spec that the store uses, and what there is of its tier."""

    spec: KvSpec
    membership: ExitStack = field(default_factory=ExitStack)
    """Closed as soon as another spec is wanted: then the tier is none of the store's any more, and hears no news."""


class Disk:
    """Follower. Made by `open_disk`; used from its event loop."""

    busy = False
    """A new spec leaves old blocks where they are, and writes under way run to their end."""

    def __init__(
        self,
        spaces: Spaces,
        host: HostTier,
        sessions: SessionTable,
        *,
        number: int,
        tiers: Tiers,
        rules: Rules,
        flush_s: float,
    ) -> None:
        """The `number` is its own among those that share `spaces`. At the end it writes for at most `flush_s`."""
        self._number = number
        self._spaces = spaces
        self._host = host
        self._sessions = sessions
        self._tiers = tiers
        self._rules = rules
        self._flush_s = flush_s
        self._learned = Learned()
        self._wanted: deque[_Wanted] = deque(maxlen=1)
        """Empty before the store has a spec."""
        self._news = asyncio.Event()
        """Another spec is wanted, or the store ends."""
        self._stopping = self._over = False

    @property
    def condition(self) -> Condition:
        """What the disk may still write, and whether it fails."""
        return self._spaces.condition

    def figures(self) -> Mapping[str, int | float]:
        """Returns the fields of NvmeStats in the proto."""
        return spaces_figures(self._spaces, [self])

    def space_figures(self) -> Mapping[str, int | float]:
        """Returns those of them that are of its own space; empty while none is open."""
        return self._tiers.figures(TierKind.NVME)

    def format_for(self, spec: KvSpec) -> None:
        """Opens the space of `spec` in the background, unless it is open. Blocks of other specs stay on the disk."""
        if any(wanted.spec == spec for wanted in self._wanted):
            return
        for wanted in self._wanted:
            wanted.membership.close()
        self._wanted.append(_Wanted(spec))
        self._tiers.expect(TierKind.NVME)
        self._news.set()

    async def run(self) -> None:
        """Opens the space of the wanted spec, and is a tier with it, until `stop`.

        What is wanted then is opened all the same, once: there may be blocks to write.
        """
        while not self._over:
            self._news.clear()
            self._over = self._stopping
            for wanted in tuple(self._wanted):
                await self._follow(wanted)
            if not self._over:
                await self._pause(_RETRY_S)

    def stop(self) -> None:
        """Ends `run`, soon."""
        self._stopping = True
        self._news.set()

    async def _pause(self, seconds: float) -> None:
        """Waits for news, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    async def _follow(self, wanted: _Wanted) -> None:
        """Opens the space of a spec, and is a tier with it for as long as it is wanted."""
        moved = partial(self._tiers.moved, TierKind.NVME)
        try:
            async with AsyncExitStack() as stack:
                try:
                    blocks = await stack.enter_async_context(self._spaces.opened(wanted.spec, moved))
                except (OSError, ConfigError) as error:
                    self.condition.writing_failed(str(error))
                    await self._spaces.save(wanted.spec, self._number)
                    return
                if wanted in self._wanted:
                    await self._serve(wanted, blocks)
        finally:
            if wanted in self._wanted:
                self._tiers.expect_no_more(TierKind.NVME)

    async def _serve(self, wanted: _Wanted, blocks: DiskBlocks) -> None:
        """Is a tier, until another spec is wanted or the store ends; then writes what has earned it."""
        with wanted.membership as membership:
            now = self._rules.now
            awaited = membership.enter_context(self._sessions.awaited(now()))
            mover = DiskMover(blocks, self._host, self._sessions, awaited, now=now, learned=self._learned)
            membership.enter_context(self._tiers.keeping(DiskTier(blocks, mover, self._rules.now)))
            membership.enter_context(self._host.watched_by(mover))
            membership.enter_context(self._host.uses_heard_by(mover.used))
            self._tiers.expect_no_more(TierKind.NVME)
            await mover.look()
            async with beside(mover.run, name="disk mover", on_failure="restart", failed=self._rules.failed):
                while not (self._stopping or self._news.is_set()):
                    await self._spaces.save(wanted.spec, self._number)
                    await self._pause(_SAVE_S)
            if wanted in self._wanted:
                self._over = True
                await mover.flush(self._flush_s)
                await self._spaces.save(wanted.spec, self._number)


@contextmanager
def open_spaces(config: KvStoreConfig, directory: Path, rules: Rules) -> Iterator[Spaces]:
    """The directory of `config`, of which each partition may open a space. Raises ConfigError."""
    options = NvmeOptions(
        directory=directory,
        total=config.nvme_bytes,
        per_s=config.nvme_write_bytes_per_s,
        per_day=config.nvme_write_bytes_per_day,
        direct=config.nvme_direct,
    )
    spaces = Spaces(options, rules.now, shares=config.partitions, policy=rules.policy, promises=rules.promises)
    try:
        yield spaces
    finally:
        spaces.close()


def spaces_figures(spaces: Spaces, disks: Sequence[Disk]) -> Mapping[str, int | float]:
    """The fields of NvmeStats in the proto, of several disks together."""
    return {**asdict(spaces.condition.stats()), **added([disk.space_figures() for disk in disks])}


@asynccontextmanager
async def open_disk(
    spaces: Spaces,
    host: HostTier,
    sessions: SessionTable,
    *,
    number: int,
    last: KvSpec | None,
    tiers: Tiers,
    rules: Rules,
    flush_s: float,
) -> AsyncIterator[Disk]:
    """The disk at work for one partition, a tier whenever a space is open; with that of the spec `last` at once.

    At the end it writes the blocks that earned it, for `flush_s` at most. Leave it when no block is brought any more,
    and before host memory.
    """
    disk = Disk(spaces, host, sessions, number=number, tiers=tiers, rules=rules, flush_s=flush_s)
    with tiers.followed_by(disk):
        async with beside(disk.run, name="disk", on_failure="restart", failed=rules.failed) as following:
            try:
                if last is not None:
                    disk.format_for(last)
                    await tiers.settled()
                yield disk
            finally:
                disk.stop()
                await following.ended()
