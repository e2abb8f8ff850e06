"""Keeps promised blocks to the last, whatever the eviction policy ranks first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic

from penstock.kv.eviction.base import EvictionPolicy, KeepableT
from penstock.kv.hint import ReturnHint

_SLACK = 64


class KeepPromised(Generic[KeepableT]):
    """An EvictionPolicy around another one.

    A block whose `retained_until` is still to come is not shown to the inner policy before that time. When nothing
    else may go, the block whose promise ends first does: a tier that is full of promises still takes what is new.
    """

    def __init__(self, inner: EvictionPolicy[KeepableT], clock: Callable[[], float]) -> None:
        self._inner = inner
        self._clock = clock
        self._kept: dict[bytes, tuple[float, int, KeepableT]] = {}
        self._ends: list[tuple[float, int, KeepableT]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._inner) + len(self._kept)

    def block_stored(self, block: KeepableT) -> None:
        """Passes the new block to the inner policy."""
        self._inner.block_stored(block)

    def block_removed(self, block: KeepableT) -> None:
        """Passes the removal to the inner policy."""
        self._inner.block_removed(block)

    def block_used(self, block: KeepableT) -> None:
        """Passes the use to the inner policy."""
        self._inner.block_used(block)

    def expect_session(self, session: str, outlook: ReturnHint) -> None:
        """Passes the hint to the inner policy."""
        self._inner.expect_session(session, outlook)

    def offer_block(self, block: KeepableT) -> None:
        """Keeps a promised block back until its promise ends, and passes any other to the inner policy.

        Offer a block again when its `retained_until` has changed.
        """
        if block.retained_until <= self._clock():
            self._kept.pop(block.key, None)
            self._inner.offer_block(block)
            return
        self._inner.withdraw_block(block)
        self._count += 1
        entry = (block.retained_until, self._count, block)
        self._kept[block.key] = entry
        heapq.heappush(self._ends, entry)
        if len(self._ends) > 2 * len(self._kept) + _SLACK:
            self._ends = list(self._kept.values())
            heapq.heapify(self._ends)

    def withdraw_block(self, block: KeepableT) -> None:
        """Withdraws the block from the promised ones, or else from the inner policy."""
        if self._kept.pop(block.key, None) is None:
            self._inner.withdraw_block(block)

    def next_victim(self) -> KeepableT | None:
        """Takes out the inner policy's victim or, when it has none, the block whose promise ends first."""
        now = self._clock()
        while self._ends and self._ends[0][0] <= now:
            block = self._pop()
            if block is not None:
                self._inner.offer_block(block)
        victim = self._inner.next_victim()
        while victim is None and self._ends:
            victim = self._pop()
        return victim

    def _pop(self) -> KeepableT | None:
        """Takes out the entry that ends first; None when it is out of date."""
        entry = heapq.heappop(self._ends)
        block = entry[2]
        if self._kept.get(block.key) is not entry:
            return None
        del self._kept[block.key]
        return block
