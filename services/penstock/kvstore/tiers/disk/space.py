"""The blocks of one spec on the disk: the slabs, the table of their blocks, and the way in.

The table is a BlockTable like that of the host tier, with slots of the disk instead of slots of memory: the same
two-phase put, pins, tree and eviction. Its epochs are the sequence numbers in the slots' headers. Everything here
runs on the event loop but the calls of `Slabs`, which run in threads.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from penstock.kv.bytes.checksum import checksum
from penstock.kvstore.table.blocks import Block, BlockPolicy, Written
from penstock.kvstore.table.promises import Promises
from penstock.kvstore.table.table import BlockTable
from penstock.kvstore.tiers.disk.format import Header
from penstock.kvstore.tiers.disk.reader import DiskReader
from penstock.kvstore.tiers.disk.scan import ScanResult
from penstock.kvstore.tiers.disk.slabs import Slabs
from penstock.kvstore.tiers.disk.stats import Traffic
from penstock.runtime.threads import started_threads, to_its_end


@dataclass(frozen=True, slots=True)
class SpaceWatcher:
    """Says of every key that it came or went."""

    moved: Callable[[bytes], None]

    def block_stored(self, block: Block) -> None:
        self.moved(block.key)

    def block_removed(self, block: Block) -> None:
        self.moved(block.key)

    def slot_held(self, slot: int, epoch: int) -> None:
        """Does nothing: no client maps the disk."""


class Damaged(Exception):
    """Blocks of the host tier whose bytes changed after they were stored."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__(f"{len(blocks)} blocks do not match their checksums")
        self.blocks = blocks


class Space:
    """The blocks of one spec. Its owner closes it when no read or write is under way."""

    def __init__(
        self,
        slabs: Slabs,
        slots: int,
        found: ScanResult,
        *,
        policy: Callable[[], BlockPolicy],
        promises: Promises,
        moved: Callable[[bytes], None],
        now: Callable[[], float],
        traffic: Traffic,
        tokens: int,
        grow: Callable[[int], object],
    ) -> None:
        """`moved` hears of every key that comes or goes; `grow` opens a slab that is not there yet, in a thread.

        A block has `tokens` tokens. Blocking.
        """
        self.slabs = slabs
        self._tokens = tokens
        self._grow = grow
        self._now = now
        self._traffic = traffic
        sequences = itertools.count(found.sequence + 1)
        self.table = BlockTable(
            slots,
            slabs.shape.slot_bytes,
            SpaceWatcher(moved),
            policy=policy,
            epochs=sequences,
            cooling_s=0.0,
            promises=promises,
        )
        self._restore(found.blocks)
        self._writer = started_threads(1, "penstock-nvme-write")
        self.reader = DiskReader(self.table, slabs, self._writer, now, traffic)

    def _restore(self, blocks: Sequence[Block]) -> None:
        """Restores the blocks stored before a restart, and their promises for the seconds that are left."""
        wall, promises = time.time(), []
        for block in blocks:
            if block.retained_until > wall and block.namespace:
                promises.append((block, block.retained_until - wall))
            block.retained_until = 0.0
        self.table.restore(blocks, self._now())
        for block, left in promises:
            self.table.promise([block.key], left, block.namespace, self._now())

    def room(self, block: Block) -> Block | None:
        """A slot of the disk for a block of the host tier; None: it is there already, or no block may go for it."""
        slot = self.table.puts.reserve_own(block.wanted(), self._now()).block
        if slot is not None:
            slot.inherit(block)
            slot.retained_until = self.table.promised_until(block.key)
        return slot

    async def write(self, pairs: Sequence[tuple[Block, Block, memoryview]]) -> None:
        """Writes blocks of the host tier (first) into slots from `room` (second), and makes them findable there.

        When it fails or is cancelled, it gives back the slots of blocks that are not written. Raises OSError, Damaged.
        """
        pairs = sorted(pairs, key=lambda pair: pair[1].slot)
        slots = [slot.slot for _, slot, _ in pairs]
        left = list(pairs)
        try:
            for run in self.slabs.shape.runs(slots):
                part = [pairs[index] for index in run]
                written: list[bool] = []  # also when the caller was cancelled meanwhile
                try:
                    await to_its_end(self._writer, partial(self._write, part, written))
                finally:
                    if written:
                        self._commit(part)
                        left = left[len(part) :]
        finally:
            for _, slot, _ in left:
                self.table.puts.commit_own(Written(slot.key, slot.epoch, b""), self._now())
            self.erase([slot for _, slot, _ in left])  # of whose slots others have left for them

    def _write(self, part: Sequence[tuple[Block, Block, memoryview]], written: list[bool]) -> None:
        """In a thread. Says in `written` that it has ended well."""
        bad = [block for block, _, view in part if checksum(view) != block.checksum]
        if bad:
            raise Damaged(bad)
        if not self.slabs.is_open(part[0][1].slot):
            self._grow(part[0][1].slot // self.slabs.shape.slab_slots)
        headers = [
            Header(
                key=block.key,
                parent=block.parent,
                checksum=block.checksum,
                namespace=block.namespace,
                first_token=block.first_token,
                tokens=self._tokens,
                length=self.slabs.shape.block_bytes,
                sequence=slot.epoch,
                seconds=block.seconds,
                uses=block.uses,
                retained_until=_wall(slot.retained_until, self._now()),
            )
            for block, slot, _ in part
        ]
        self.slabs.write([slot.slot for _, slot, _ in part], headers, [view for _, _, view in part])
        written.append(True)

    def _commit(self, part: Sequence[tuple[Block, Block, memoryview]]) -> None:
        for block, slot, _ in part:
            self.table.puts.commit_own(Written(slot.key, slot.epoch, block.checksum), self._now())
        self.erase([slot for _, slot, _ in part if self.table.find(slot.key) is not slot])  # its tenant was dropped
        self._traffic.blocks_written += len(part)
        self._traffic.bytes_written += len(part) * self.slabs.shape.slot_bytes

    def erase(self, blocks: Sequence[Block]) -> None:
        """Empties the places of blocks that have left, behind the writes that are under way and before all later ones:
        no later process finds them."""
        if blocks:
            self._writer.submit(self._erase, [block.slot for block in blocks])

    def _erase(self, slots: Sequence[int]) -> None:
        """In a thread."""
        for slot in filter(self.slabs.is_open, slots):  # others were never written
            with suppress(OSError):  # the next write there says so
                self.slabs.erase(slot)

    async def in_writer(self, job: Callable[[], object]) -> None:
        """Runs a job of the files behind all writes. Raises what it raises."""
        await to_its_end(self._writer, job)

    async def close(self) -> None:
        """Waits for the threads, and closes the files."""
        await self.reader.close()
        await asyncio.to_thread(self._writer.shutdown)
        self.slabs.close()


def _wall(until: float, now: float) -> float:
    """A time of the table's clock in seconds since 1970; 0, and what is past, is 0."""
    return time.time() + until - now if until > now else 0.0
