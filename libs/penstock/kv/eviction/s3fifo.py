"""A reference that resists scans.

Yang, Zhang, Qiu, Yue, Vinayak: "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Generic

from penstock.kv.eviction.base import BlockT
from penstock.kv.hint import ReturnHint

_SMALL, _MAIN = 0, 1
_SMALL_SHARE = 0.1
_MOST_FREQUENT = 3
_SLACK = 64


class _Place(Generic[BlockT]):
    """Where a block stands; it keeps its place while it may not go."""

    __slots__ = ("block", "frequency", "queue", "since", "ticket", "uses")

    def __init__(self, block: BlockT, queue: int, since: int) -> None:
        self.block = block
        self.queue = queue
        self.since = since
        """Its order in the queue."""
        self.frequency = 0
        self.uses = block.uses
        self.ticket = 0
        """Of the heap entry that offers it; 0: not on offer."""


class S3Fifo(Generic[BlockT]):
    """Three queues: small, main, and the keys of those that left small unused. O(log n) per call, amortised.

    As in the paper: new blocks enter the small queue, a tenth of the table; at its end those used more than once
    move to the main queue, others go and leave their key (as many as the main queue has room for); a block whose key
    is remembered enters the main queue. At the end of the main queue a used block starts again with one use less.
    What differs is that only offered blocks can go: a queue is a heap in the order of entry, of offered blocks only.
    """

    def __init__(self) -> None:
        self._heaps: tuple[list[tuple[int, int, _Place[BlockT]]], ...] = ([], [])
        self._offered = [0, 0]
        self._members = [0, 0]
        """Stored blocks, on offer or not."""
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return sum(self._offered)

    def block_stored(self, block: BlockT) -> None:
        """Enters the block into the small queue, or into the main queue when its key is remembered."""
        queue = _SMALL
        if block.key in self._ghosts:
            del self._ghosts[block.key]
            queue = _MAIN
        self._members[queue] += 1
        block.note = _Place(block, queue, self._next())

    def block_removed(self, block: BlockT) -> None:
        """Gives up the block's place in its queue."""
        place: _Place[BlockT] = block.note
        self._members[place.queue] -= 1
        block.note = None

    def block_used(self, block: BlockT) -> None:
        """Counts a separate use of the block, up to three."""
        place: _Place[BlockT] = block.note
        if block.uses > place.uses:
            place.uses = block.uses
            place.frequency = min(place.frequency + 1, _MOST_FREQUENT)

    def expect_session(self, session: str, outlook: ReturnHint) -> None:
        """S3-FIFO takes no hints."""

    def offer_block(self, block: BlockT) -> None:
        """Puts the block on offer at the place that it has kept in its queue."""
        place: _Place[BlockT] = block.note
        if not place.ticket:
            self._enter(place)

    def withdraw_block(self, block: BlockT) -> None:
        """Takes the block off offer; it keeps its place in its queue."""
        place: _Place[BlockT] | None = block.note
        if place is not None and place.ticket:
            self._offered[place.queue] -= 1
            place.ticket = 0

    def next_victim(self) -> BlockT | None:
        """Takes out the first block with too few uses; blocks before it enter the main queue again."""
        while len(self):
            small = self._members[_SMALL] > _SMALL_SHARE * sum(self._members)
            queue = _SMALL if self._offered[_SMALL] and (small or not self._offered[_MAIN]) else _MAIN
            place = self._pop(queue)
            if queue == _SMALL and place.frequency > 1:
                place.frequency = 0
                self._members[_SMALL] -= 1
                self._members[_MAIN] += 1
            elif queue == _MAIN and place.frequency > 0:
                place.frequency -= 1
            else:
                if queue == _SMALL:
                    self._remember(place.block.key)
                return place.block
            place.queue, place.since = _MAIN, self._next()
            self._enter(place)
        return None

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _enter(self, place: _Place[BlockT]) -> None:
        place.ticket = self._next()
        self._offered[place.queue] += 1
        heap = self._heaps[place.queue]
        heapq.heappush(heap, (place.since, place.ticket, place))
        if len(heap) > 2 * self._offered[place.queue] + _SLACK:
            heap[:] = [entry for entry in heap if entry[2].ticket == entry[1]]
            heapq.heapify(heap)

    def _pop(self, queue: int) -> _Place[BlockT]:
        heap = self._heaps[queue]
        while True:
            _, ticket, place = heapq.heappop(heap)
            if place.ticket == ticket:
                place.ticket = 0
                self._offered[queue] -= 1
                return place

    def _remember(self, key: bytes) -> None:
        self._ghosts[key] = None
        while len(self._ghosts) > (1 - _SMALL_SHARE) * sum(self._members):
            self._ghosts.popitem(last=False)
