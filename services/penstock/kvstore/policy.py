"""Which block goes when room is needed.

A policy sees only blocks that may go: stored, not leased, and without a stored child, so that no child is ever
kept without its parent. It is pure: blocks in, a choice out.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from penstock.kvstore.blocks import Block

_SLACK = 64


class EvictionPolicy(Protocol):
    """An order over the blocks that may be evicted."""

    def offer(self, block: Block) -> None:
        """`block` may go from now on, or was used while it might."""

    def withdraw(self, block: Block) -> None:
        """`block` may not go, or is gone. Unknown blocks are ignored."""

    def victim(self) -> Block | None:
        """Takes out the block that should go first; None when none may."""

    def __len__(self) -> int:
        """Blocks that may go."""
        ...


class Lru:
    """The longest unused block goes first. O(log n) per call, amortised.

    A heap in the order of use rather than a list in the order of offers: a parent is offered when its last child
    goes, and its place is that of its own last use.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Block]] = []
        self._current: dict[bytes, tuple[int, int, Block]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._current)

    def offer(self, block: Block) -> None:
        """See EvictionPolicy."""
        self._count += 1
        entry = (block.used, self._count, block)
        self._current[block.key] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)

    def withdraw(self, block: Block) -> None:
        """See EvictionPolicy."""
        self._current.pop(block.key, None)

    def victim(self) -> Block | None:
        """See EvictionPolicy."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            block = entry[2]
            if self._current.get(block.key) is entry:
                del self._current[block.key]
                return block
        return None
