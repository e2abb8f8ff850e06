"""What brings blocks into host memory: the seam between the block table and every other place that has blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from penstock.kv.bytes.arena import Arena
from penstock.kvstore.table.blocks import Block, Reserved, TierKind, Wanted, Written
from penstock.kvstore.table.table import BlockTable


class Supplier(Protocol):
    """A place that has blocks: a disk, a device, another store."""

    @property
    def tier(self) -> TierKind:
        """Where the blocks are that it brings."""
        ...

    def has(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys it could bring. Cheap; for a remote store it may be a guess."""
        ...

    def all_keys(self) -> Iterable[bytes]:
        """All that it has, for those who start to listen; nothing when it is not a tier of this store."""
        ...

    def find(self, key: bytes) -> Block | None:
        """What it knows of a block that it has; to be read, not changed. None also for all that is elsewhere."""
        ...

    async def bring(self, keys: Sequence[bytes], room: Room, until: float) -> int:
        """Fills slots of `room` with the blocks named, in order, verified; returns how many leading ones are stored.

        Stops early at a block that is damaged or gone, when the room is full, and at `until` of the monotonic clock;
        it does not raise for any of these. Also when cancelled it returns only when nobody writes into a slot that
        it has not committed: such slots are handed out again at once.
        """
        ...


class Room:
    """Slots of the host tier for one bringing. Whatever is reserved and not committed is given back at its end."""

    def __init__(self, store: BlockTable, arena: Arena, now: Callable[[], float], landed: Callable[[], None]) -> None:
        """`landed` is called after each block that became findable."""
        self.block_bytes = store.block_bytes
        """Of each block."""
        self._store = store
        self._arena = arena
        self._now = now
        self._landed = landed
        self._mine: dict[bytes, Block] = {}

    def reserve(self, wanted: Wanted) -> Reserved:
        """A slot for a block. EXISTS: it is stored or being written by now, skip it. FULL: there is no room, stop."""
        answer = self._store.puts.reserve_own(wanted, self._now())
        if answer.block is not None:
            self._mine[wanted.key] = answer.block
        return answer

    def view(self, block: Block) -> memoryview:
        """The bytes of a reserved block, writable. Release it, or drop it, before the bringing ends."""
        return self._arena.block(block.slot, self.block_bytes)

    def commit(self, block: Block, checksum: bytes) -> None:
        """The block's bytes are in place and verified: it can be found, and is pinned for those who wait for it."""
        del self._mine[block.key]
        self._store.puts.commit_own(Written(block.key, block.epoch, checksum), self._now())
        self._landed()

    def give_back(self, block: Block) -> None:
        """The block will not come."""
        del self._mine[block.key]
        self._store.puts.commit_own(Written(block.key, block.epoch, b""), self._now())

    def close(self) -> None:
        """Gives back what is left."""
        for block in list(self._mine.values()):
            self.give_back(block)
