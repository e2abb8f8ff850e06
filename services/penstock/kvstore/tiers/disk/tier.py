"""The disk as a tier: the blocks of one spec, and the mover that writes them and brings them back before their use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from penstock.kv.hint import ReturnHint
from penstock.kv.spec import KvSpec
from penstock.kvstore.table.blocks import Block, TierKind
from penstock.kvstore.table.promises import Grant
from penstock.kvstore.tiers.base import Dropped, Supplier, Wish
from penstock.kvstore.tiers.disk.blocks import DiskBlocks
from penstock.kvstore.tiers.disk.mover import DiskMover


class DiskTier:
    """KeepingTier. It exists while the space of its spec is open; used from its event loop."""

    kind = TierKind.NVME

    def __init__(self, blocks: DiskBlocks, mover: DiskMover, now: Callable[[], float]) -> None:
        self._blocks = blocks
        self._mover = mover
        self._now = now

    @property
    def spec(self) -> KvSpec:
        """The spec of the open space; before the first client that of the last process."""
        return self._blocks.spec

    def suppliers(self, wish: Wish) -> Sequence[Supplier]:
        """Returns the blocks of the open space."""
        return (self._blocks,)

    def has_blocks(self, keys: Sequence[bytes]) -> int:
        """Counts the leading keys that are on the disk; 0 while reading is suspended after a failure."""
        return self._blocks.has_blocks(keys)

    def find_block(self, key: bytes) -> Block | None:
        """Finds a block in the table of the disk; None: it is not there."""
        return self._blocks.table.find(key)

    def stored_keys(self) -> Iterable[bytes]:
        """Returns a live view of the keys on the disk."""
        return self._blocks.table.keys()

    def promise_blocks(self, keys: Sequence[bytes], seconds: float, namespace: bytes) -> Grant:
        """Promises blocks on the disk, and has those that are only in memory written first."""
        grant = self._blocks.table.promise(keys, seconds, namespace, self._now())
        self._mover.promised(keys[: grant.blocks])
        return grant

    def renew_promises(self, keys: Sequence[bytes]) -> None:
        """Renews what the disk has promised of these blocks."""
        self._blocks.table.renew(keys, self._now())

    def touch_blocks(self, keys: Sequence[bytes], session: str) -> None:
        """Counts as a use of the blocks that are on the disk."""
        self._blocks.touch(keys, session)

    def expect_session(self, session: str, hint: ReturnHint) -> None:
        """Passes the hint to the eviction policy of the disk, and wakes the mover, which may bring its blocks."""
        self._blocks.table.expect_session(session, hint)
        self._mover.wake()

    async def drop_tenant(self, namespace: bytes) -> Dropped:
        """Has a tenant's blocks leave the disk, also for the next process."""
        return await self._blocks.drop_tenant(namespace)

    def figures(self) -> Mapping[str, int]:
        """Returns what NvmeStats says of an open space, and the mover's queues."""
        return {**self._blocks.figures(), "pending": self._mover.pending, "waiting": self._mover.waiting}
