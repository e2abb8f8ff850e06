"""The blocks of one spec on the disk, read and written as far as its condition and its budget allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from penstock.kv.spec import KvSpec
from penstock.kvstore.table.blocks import Block, TierKind
from penstock.kvstore.table.table import BlockTable
from penstock.kvstore.tiers.base import Dropped, Room
from penstock.kvstore.tiers.disk.condition import Condition
from penstock.kvstore.tiers.disk.format import Drop
from penstock.kvstore.tiers.disk.space import Space
from penstock.kvstore.tiers.dropping import drop_tenant

_SLOW_S = 5.0
"""A write of a few MiB that takes longer says that the disk is not fit."""
_SILENCE_S = 0.5
"""A bringing that ended without a single block after this long says so, too."""


class DiskBlocks:
    """Supplier. Made by `Spaces.opened`, for as long as the space is open."""

    kind = TierKind.NVME

    def __init__(self, spec: KvSpec, space: Space, condition: Condition, now: Callable[[], float]) -> None:
        self.spec = spec
        self._space = space
        self._condition = condition
        self._now = now

    @property
    def table(self) -> BlockTable:
        """The blocks on the disk, and their places there."""
        return self._space.table

    # -- reading

    def has_blocks(self, keys: Sequence[bytes]) -> int:
        """Counts the leading keys that are on the disk; 0 while reading is suspended after a failure."""
        return self.table.lookup(keys) if self._condition.readable else 0

    async def bring_blocks(self, keys: Sequence[bytes], room: Room, until: float) -> int:
        """Reads leading blocks into `room`, verified; returns how many are stored.

        Suspends reading for a while when a block can't be read, or when the disk is too slow to bring any.
        """
        traffic = self._condition.traffic
        before, read, begin = traffic.dropped[Drop.UNREADABLE], traffic.blocks_read, self._now()
        try:
            return await self._space.reader.bring(keys, room, until)
        finally:
            if traffic.dropped[Drop.UNREADABLE] > before:
                self._condition.reading_failed("the disk does not give what was written")
            elif traffic.blocks_read > read:  # also when its time was over before all had come
                self._condition.reading_worked()
            elif self._now() >= min(until, begin + _SILENCE_S):
                self._condition.reading_failed("too slow")

    # -- writing

    @property
    def run_blocks(self) -> int:
        """Blocks that are best written together."""
        return self._space.slabs.shape.run_slots

    @property
    def slot_bytes(self) -> int:
        """The bytes that writing one block costs."""
        return self._space.slabs.shape.slot_bytes

    def holds(self, key: bytes) -> bool:
        """Whether a block is on the disk."""
        return key in self.table

    def writes_wait_s(self, blocks: int) -> float:
        """0: so many blocks may be written now. Else for how long not."""
        return self._condition.writes_wait_s(blocks * self.slot_bytes)

    async def write(self, blocks: Sequence[tuple[Block, memoryview]]) -> int:
        """Writes blocks of the host tier, pinned by the caller; returns how many were.

        A disk that fails is not an error here: `writes_wait_s` says when to try again. Raises Damaged.
        """
        space, traffic = self._space, self._condition.traffic
        slots = [(block, space.room(block), view) for block, view in blocks if not self.holds(block.key)]
        pairs = [(block, slot, view) for block, slot, view in slots if slot is not None]
        traffic.refused += len(slots) - len(pairs)
        begin, before = self._now(), traffic.bytes_written
        try:
            await space.write(pairs)
        except OSError as error:
            self._condition.writing_failed(error.strerror or str(error))
        else:
            if self._now() - begin > _SLOW_S:
                self._condition.writing_failed("too slow")
            elif pairs:
                self._condition.writing_worked()
        finally:
            self._condition.written(traffic.bytes_written - before)
        return (traffic.bytes_written - before) // self.slot_bytes

    def touch(self, keys: Iterable[bytes], session: str) -> None:
        """Records the use of blocks, in any tier, for the eviction policy of the disk."""
        for key in keys:
            self.table.touch(key, session, self._now())

    def prefetched(self) -> None:
        """Counts a bringing for a session that was expected."""
        self._condition.traffic.prefetched += 1

    async def drop_tenant(self, namespace: bytes) -> Dropped:
        """Has a tenant's blocks leave, and empties their places; returns when that would survive a loss of power, as
        far as the disk does what it is told."""
        await self._space.in_writer(lambda: None)  # what is being written can be found then
        dropped = await drop_tenant(self.table, self.kind, namespace, self._space.erase)
        try:
            await self.sync()
        except OSError as error:
            self._condition.writing_failed(error.strerror or str(error))
        return dropped

    async def sync(self) -> None:
        """Returns when written blocks would survive a loss of power, and damaged ones are erased. Raises OSError."""
        await self._space.in_writer(self._space.slabs.sync)

    # -- figures

    def figures(self) -> Mapping[str, int]:
        """Returns what NvmeStats says of an open space."""
        table = self.table.stats()
        return {
            "slots": table.slots,
            "blocks": table.blocks,
            "used_bytes": table.used_bytes,
            "evictions": table.evictions,
            "reading": int(self._condition.readable),
            "writing": int(self._condition.writable),
            "direct": int(self._space.slabs.direct),
        }
