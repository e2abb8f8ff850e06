"""The disk tier of a running store: it has one space open at a time, that of the spec in use, and a budget for
writing. When the disk fails, reading or writing stops for a while, the log says so once, and the store goes on."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import structlog

from penstock.kv.spec import KvSpec
from penstock.kvstore.eviction.lru import Lru
from penstock.kvstore.table.blocks import Block, BlockPolicy, TierKind
from penstock.kvstore.table.promises import Promises
from penstock.kvstore.table.table import BlockTable
from penstock.kvstore.tiers.base import Room
from penstock.kvstore.tiers.disk.budget import WriteBudget
from penstock.kvstore.tiers.disk.files import Files
from penstock.kvstore.tiers.disk.format import Drop, fingerprint
from penstock.kvstore.tiers.disk.health import Health
from penstock.kvstore.tiers.disk.home import Home
from penstock.kvstore.tiers.disk.options import NvmeOptions
from penstock.kvstore.tiers.disk.scan import ScanResult, progress_bar, scan
from penstock.kvstore.tiers.disk.slabs import Slabs, SlabShape
from penstock.kvstore.tiers.disk.space import Space, SpaceWatcher
from penstock.kvstore.tiers.disk.stats import NvmeStats, Traffic
from penstock.runtime.config import ConfigError

_SLOW_S = 5.0
"""A write of a few MiB that takes longer says that the disk is not fit."""
_SILENCE_S = 0.5
"""A bringing that ended without a single block after this long says so, too."""
_SAVE_S = 30.0
_RETRY_S = 5.0


class NvmeTier:
    """The files of the disk tier. `open_disk` opens it, runs it and closes it."""

    def __init__(
        self,
        options: NvmeOptions,
        now: Callable[[], float],
        *,
        moved: Callable[[bytes], None] = lambda key: None,
        changed: Callable[[], None] = lambda: None,
        policy: Callable[[], BlockPolicy] = Lru,
        promises: Callable[[int], Promises] = lambda slots: Promises(0, 0, 0.0),
        files: Files | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`moved` hears of keys that come and go, `changed` of a change of everything.

        Raises ConfigError when the directory can't be ours.
        """
        self.kind = TierKind.NVME
        self.budget = WriteBudget(options.per_s, options.per_day)
        self._options = options
        self._now, self._wall = now, wall
        self._moved, self._changed = moved, changed
        self._policy, self._promises = policy, promises
        self._files = files or Files()
        self._home = Home(options.directory)
        self._space: Space | None = None
        self._nothing = BlockTable(0, 0, SpaceWatcher(self._moved))
        self._old: Space | None = None
        self._spec: KvSpec | None = None
        self._wanted: KvSpec | None = None
        self._stopping = False
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._traffic = Traffic()
        self._reads, self._writes = Health(), Health()
        self._refused = 0
        self._log = structlog.get_logger("penstock.kvstore.nvme")

    # -- Supplier

    def has_blocks(self, keys: Sequence[bytes]) -> int:
        """Counts the leading keys that are on the disk; 0 while reading is suspended after a failure."""
        return self.table.lookup(keys) if self._reads.usable(self._now()) else 0

    async def bring_blocks(self, keys: Sequence[bytes], room: Room, until: float) -> int:
        """Reads leading blocks into `room`; returns how many are stored. Returns 0 before a space is open.

        Suspends reading for a while when a block can't be read, or when the disk is too slow to bring any.
        """
        space, before, read = self._space, self._traffic.dropped[Drop.UNREADABLE], self._traffic.blocks_read
        begin = self._now()
        if space is None:
            return 0
        try:
            return await space.reader.bring(keys, room, until)
        finally:
            if self._traffic.dropped[Drop.UNREADABLE] > before:
                self._failed("reading", self._reads, "the disk does not give what was written")
            elif self._traffic.blocks_read > read:  # also when its time was over before all had come
                self._worked("reading", self._reads)
            elif self._now() >= min(until, begin + _SILENCE_S):
                self._failed("reading", self._reads, "too slow")

    @property
    def table(self) -> BlockTable:
        """The table of the open space; an empty one when no space is open."""
        return self._space.table if self._space is not None else self._nothing

    # -- writing

    @property
    def spec(self) -> KvSpec | None:
        """The spec of the blocks that can be written now; None: none can."""
        return self._spec if self._space is not None else None

    @property
    def slot_bytes(self) -> int:
        """The bytes that writing one block costs."""
        return self._space.slabs.shape.slot_bytes if self._space is not None else 0

    @property
    def run_blocks(self) -> int:
        """Blocks that are best written together."""
        return self._space.slabs.shape.run_slots if self._space is not None else 1

    def holds(self, key: bytes) -> bool:
        """Whether a block is on the disk."""
        return key in self.table

    def writes_wait_s(self, size: int) -> float:
        """0: `size` bytes may be written now. Else for how long not."""
        now = self._now()
        if not self._writes.usable(now):
            return self._writes.until - now
        return self.budget.wait_s(size, now, self._wall())

    async def write(self, blocks: Sequence[tuple[Block, memoryview]]) -> int:
        """Writes blocks of the host tier, pinned by the caller; returns how many were.

        A disk that fails is not an error here: `writes_wait_s` says when to try again. Raises Damaged.
        """
        space = self._space
        if space is None:
            return 0
        slots = [(block, space.room(block), view) for block, view in blocks if not self.holds(block.key)]
        pairs = [(block, slot, view) for block, slot, view in slots if slot is not None]
        self._refused += len(slots) - len(pairs)
        begin, before = self._now(), self._traffic.bytes_written
        try:
            await space.write(pairs)
        except OSError as error:
            self._failed("writing", self._writes, error.strerror or str(error))
        else:
            if self._now() - begin > _SLOW_S:
                self._failed("writing", self._writes, "too slow")
            elif pairs:
                self._worked("writing", self._writes)
        finally:
            self.budget.spend(self._traffic.bytes_written - before, self._wall())
        return (self._traffic.bytes_written - before) // space.slabs.shape.slot_bytes

    def touch(self, keys: Iterable[bytes], session: str) -> None:
        """Records the use of blocks, in any tier, for the eviction policy of the disk."""
        for key in keys:
            self.table.touch(key, session, self._now())

    # -- life

    async def open(self) -> None:
        """Opens the space that the last process used last, if it left one."""
        data = await self._home.read()
        day, spent = data.get("day"), data.get("spent")
        if isinstance(day, int) and isinstance(spent, int):
            self.budget.day, self.budget.spent = day, max(0, spent)
        spec = await self._home.spec_of(data.get("last"))
        if spec is not None:
            self._wanted = spec
            await self.follow()

    def use(self, spec: KvSpec) -> None:
        """From now on blocks of `spec`, and no others. They are findable when their headers have been read."""
        self._wanted = spec
        if spec != self._spec:
            self._old, self._space, self._spec = self._space or self._old, None, None
            self._settled.clear()
            self._wake.set()

    async def settled(self, limit_s: float) -> None:
        """Returns when the blocks of the wanted spec are findable, or known not to be; at the latest at the limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._settled.wait()

    async def run(self) -> None:
        """Changes to another spec's space when it is wanted, and keeps the manifest, until `stop`.

        It is not to be cancelled: half done, either would leave files open.
        """
        while not self._stopping:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SAVE_S if self._wanted == self._spec else _RETRY_S):
                    await self._wake.wait()
            self._wake.clear()
            await self.follow()
            await self._save()

    def stop(self) -> None:
        """Ends `run`, soon."""
        self._stopping = True
        self._wake.set()

    async def follow(self) -> None:
        """Changes to the wanted space, when that is another one."""
        spec = self._wanted
        if spec is None or spec == self._spec:
            return
        await self._leave()
        try:
            space = await self._enter(spec)
        except (OSError, ConfigError) as error:
            self._failed("writing", self._writes, str(error))
            self._settled.set()
            return
        if spec != self._wanted:
            self._old = space
            return
        self._space, self._spec = space, spec
        self._settled.set()
        if not space.table.stats().slots:
            self._log.warning("no block of this spec fits into nvme_bytes", slot_bytes=self.slot_bytes)
        await self._save()
        self._changed()

    async def _leave(self) -> None:
        spaces, self._space, self._old, self._spec = (self._space, self._old), None, None, None
        for space in spaces:
            if space is not None:
                await space.close()

    async def _enter(self, spec: KvSpec) -> Space:
        total = self._options.total
        shape = await self._home.prepare(spec, total)
        directory = self._home.space(spec)
        slabs = Slabs(directory, shape, fingerprint(spec), self._files, direct=self._options.direct)
        slots = total // shape.slab_bytes * shape.slab_slots
        found = await asyncio.to_thread(self._look, slabs, shape, slots)
        self._traffic.dropped.update(found.dropped)
        self._log.info(
            "disk tier",
            blocks=len(found.blocks),
            slots=slots,
            direct=slabs.direct,
            **{drop.value: count for drop, count in found.dropped.items() if count},
        )
        return await asyncio.to_thread(  # nothing else uses it yet, and a table of a million blocks takes seconds
            partial(
                Space,
                slabs,
                slots,
                found,
                policy=self._policy,
                promises=self._promises(slots),
                moved=self._moved,
                now=self._now,
                traffic=self._traffic,
                tokens=spec.block_size,
                grow=lambda slab: self._grow(slabs, slab),
            )
        )

    def _look(self, slabs: Slabs, shape: SlabShape, slots: int) -> ScanResult:
        for slab in slabs.existing():
            if slab * shape.slab_slots >= slots:
                slabs.path(slab).unlink()
        self._home.make_room(0, self._options.total, self._home.path / slabs.path(0).parent.name)
        with progress_bar("reading the disk tier's index") as advance:
            return scan(slabs, slots, advance)

    def _grow(self, slabs: Slabs, slab: int) -> None:
        path = slabs.path(slab)
        size = 0 if path.exists() else slabs.shape.slab_bytes
        if not self._home.make_room(size, self._options.total, path.parent):
            raise OSError(errno.ENOSPC, "the directory holds more than it should")
        slabs.open(slab)

    async def sync(self) -> None:
        """Returns when all written blocks, and the day's account, would survive a loss of power."""
        if self._space is not None:
            with suppress(OSError):
                await self._space.in_writer(self._space.slabs.sync)
        await self._save()

    async def _save(self) -> None:
        last = self._home.space(self._wanted).name if self._wanted is not None else ""
        try:
            await self._home.write({"last": last, "day": self.budget.day, "spent": self.budget.spent})
        except OSError as error:
            self._failed("writing", self._writes, error.strerror or str(error))

    async def close(self) -> None:
        """Lets go of the directory. When no bringing and no write is under way."""
        await self._leave()
        self._home.close()

    # -- figures

    def _failed(self, what: str, health: Health, reason: str) -> None:
        if health.failed(reason, self._now()):
            self._log.warning(f"the disk tier stops {what} for a while", reason=reason)

    def _worked(self, what: str, health: Health) -> None:
        if health.worked():
            self._log.info(f"the disk tier is {what} again")

    def stats(self) -> NvmeStats:
        """A consistent snapshot."""
        space, traffic, now = self._space, self._traffic, self._now()
        table = self.table.stats()
        return NvmeStats(
            slots=table.slots,
            blocks=table.blocks,
            used_bytes=table.used_bytes,
            read_blocks=traffic.blocks_read,
            read_bytes=traffic.bytes_read,
            written_blocks=traffic.blocks_written,
            written_bytes=traffic.bytes_written,
            evictions=table.evictions,
            **{drop.value: traffic.dropped[drop] for drop in Drop},
            read_failures=self._reads.failures,
            write_failures=self._writes.failures,
            reading=int(space is not None and self._reads.usable(now)),
            writing=int(space is not None and self._writes.usable(now)),
            direct=int(space is not None and space.slabs.direct),
            written_today=self.budget.spent,
            refused=self._refused,
        )
