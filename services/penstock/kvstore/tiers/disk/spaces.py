"""The spaces in the tier's directory, one for each spec, of which those in use are open."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import structlog

from penstock.kv.eviction.lru import Lru
from penstock.kv.spec import KvSpec
from penstock.kvstore.table.blocks import BlockPolicy
from penstock.kvstore.table.promises import Promises
from penstock.kvstore.tiers.disk.blocks import DiskBlocks
from penstock.kvstore.tiers.disk.budget import WriteBudget
from penstock.kvstore.tiers.disk.condition import Condition
from penstock.kvstore.tiers.disk.files import Files
from penstock.kvstore.tiers.disk.format import fingerprint
from penstock.kvstore.tiers.disk.home import Home
from penstock.kvstore.tiers.disk.options import NvmeOptions
from penstock.kvstore.tiers.disk.scan import ScanResult, progress_bar, scan
from penstock.kvstore.tiers.disk.slabs import Slabs
from penstock.kvstore.tiers.disk.space import Space
from penstock.runtime.threads import started_threads, to_its_end


class Spaces:
    """A directory that this process holds. `close` lets go of it."""

    def __init__(
        self,
        options: NvmeOptions,
        now: Callable[[], float],
        *,
        shares: int = 1,
        policy: Callable[[], BlockPolicy] = Lru,
        promises: Callable[[int], Promises] = lambda slots: Promises(0, 0, 0.0),
        files: Files | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """So many spaces may be open at a time, each with an equal share of the bytes.

        Raises ConfigError when the directory can't be ours.
        """
        self.condition = Condition(WriteBudget(options.per_s, options.per_day), now, wall)
        self.home = Home(options.directory)
        self._opening = started_threads(1, "penstock-nvme-open")
        self._options = options
        self._now = now
        self._share = options.total // shares
        self._last: dict[int, str] = {}
        """The names of the spaces in use, by their users."""
        self._kept: set[Path] = set()
        """Those that are open, or are being opened."""
        self._saving = asyncio.Lock()
        self._policy, self._promises = policy, promises
        self._files = files or Files()
        self._log = structlog.get_logger("penstock.kvstore.nvme")

    async def last_specs(self) -> list[KvSpec]:
        """Reads what the last process left: the day's account, and the specs that it used last."""
        data = await self.home.read()
        day, spent, budget = data.get("day"), data.get("spent"), self.condition.budget
        if isinstance(day, int) and isinstance(spent, int):
            budget.day, budget.spent = day, max(0, spent)
        names = data.get("last")
        found = [await self.home.spec_of(name) for name in (names if isinstance(names, list) else [names])]
        return [spec for spec in found if spec is not None]

    async def save(self, spec: KvSpec, user: int = 0) -> None:
        """Writes down the day's account, and that `user` used `spec` last. A failure suspends writing."""
        self._last[user] = self.home.space(spec).name
        budget = self.condition.budget
        async with self._saving:
            names = [self._last[one] for one in sorted(self._last)]
            try:
                await self.home.write({"last": names, "day": budget.day, "spent": budget.spent})
            except OSError as error:
                self.condition.writing_failed(error.strerror or str(error))

    @asynccontextmanager
    async def opened(
        self, spec: KvSpec, moved: Callable[[bytes], None] = lambda key: None
    ) -> AsyncIterator[DiskBlocks]:
        """The blocks of a spec, all headers read. Leave it when no bringing and no write is under way. `moved` hears of
        keys that come to it and leave it.

        Raises OSError, ConfigError.
        """
        path = self.home.space(spec)
        self._kept.add(path)
        try:
            space = await self._open(spec, moved)
            try:
                if not space.table.slots.count:
                    slot_bytes = space.slabs.shape.slot_bytes
                    self._log.warning("no block of this spec fits into nvme_bytes", slot_bytes=slot_bytes)
                yield DiskBlocks(spec, space, self.condition, self._now)
            finally:
                await space.close()
        finally:
            self._kept.discard(path)

    async def _open(self, spec: KvSpec, moved: Callable[[bytes], None]) -> Space:
        shape = await self.home.prepare(spec, self._share)
        slabs = Slabs(self.home.space(spec), shape, fingerprint(spec), self._files, direct=self._options.direct)
        try:
            return await to_its_end(self._opening, partial(self._read, spec, slabs, moved))
        except BaseException:
            slabs.close()
            raise

    def _read(self, spec: KvSpec, slabs: Slabs, moved: Callable[[bytes], None]) -> Space:
        """In a thread: nothing else uses the space yet, and a table of a million blocks takes seconds."""
        slots = self._share // slabs.shape.slab_bytes * slabs.shape.slab_slots
        found = self._scan(slabs, slots)
        self.condition.traffic.dropped.update(found.dropped)
        self._log.info(
            "disk tier",
            blocks=len(found.blocks),
            slots=slots,
            direct=slabs.direct,
            **{drop.value: count for drop, count in found.dropped.items() if count},
        )
        return Space(
            slabs,
            slots,
            found,
            policy=self._policy,
            promises=self._promises(slots),
            moved=moved,
            now=self._now,
            traffic=self.condition.traffic,
            tokens=spec.block_size,
            grow=lambda slab: self._grow(slabs, slab),
        )

    def _scan(self, slabs: Slabs, slots: int) -> ScanResult:
        for slab in slabs.existing():
            if slab * slabs.shape.slab_slots >= slots:
                slabs.path(slab).unlink()
        self.home.make_room(0, self._options.total, frozenset(self._kept))
        with progress_bar("reading the disk tier's index") as advance:
            return scan(slabs, slots, advance)

    def _grow(self, slabs: Slabs, slab: int) -> None:
        path = slabs.path(slab)
        size = 0 if path.exists() else slabs.shape.slab_bytes
        if not self.home.make_room(size, self._options.total, frozenset(self._kept)):
            raise OSError(errno.ENOSPC, "the directory holds more than it should")
        slabs.open(slab)

    def close(self) -> None:
        """Lets go of the directory. When no space is open."""
        self._opening.shutdown()
        self.home.close()
