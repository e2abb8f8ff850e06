"""LRU, the best-known reference."""

from __future__ import annotations

import heapq
from typing import Generic

from penstock.kv.eviction.base import BlockT
from penstock.kv.hint import ReturnHint

_SLACK = 64


class Lru(Generic[BlockT]):
    """The longest unused block goes first. O(log n) per call, amortised.

    A heap in the order of use rather than a list in the order of offers: a parent is offered when its last child
    goes, and its place is that of its own last use.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, BlockT]] = []
        self._current: dict[bytes, tuple[int, int, BlockT]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._current)

    def block_stored(self, block: BlockT) -> None:
        """Nothing to learn from it."""

    def block_removed(self, block: BlockT) -> None:
        """Nothing to learn from it."""

    def block_used(self, block: BlockT) -> None:
        """Nothing to learn from it: the offer after it says when."""

    def expect_session(self, session: str, outlook: ReturnHint) -> None:
        """LRU takes no hints."""

    def offer_block(self, block: BlockT) -> None:
        """Orders the block by its last use; a second offer replaces the first."""
        self._count += 1
        entry = (block.used, self._count, block)
        self._current[block.key] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)

    def withdraw_block(self, block: BlockT) -> None:
        """Forgets the block; its entry stays in the heap until it is popped or the heap is rebuilt."""
        self._current.pop(block.key, None)

    def next_victim(self) -> BlockT | None:
        """Takes out the block whose last use is longest ago; None when no block is on offer."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            block = entry[2]
            if self._current.get(block.key) is entry:
                del self._current[block.key]
                return block
        return None
