"""Evicts the block that is worth least: seconds of prefill saved x rate of reuse, per byte.

All blocks of a table have the same number of bytes, so bytes need no factor. The rate is learned, see `reuse`. Its
classes are those that an opaque block shows: how often it was used, and whether a conversation went on when it was
stored.

The leaf of a chain is the last to be computed and the dearest (attention); once it is gone its parent, with the same
chance of reuse, is a little cheaper, and so the next victim. So chains go one after the other, each from its end, which
is right: a request saves the leading blocks only, each for itself.

Finding the victim does not look at blocks. Those on offer stand on shelves, one per (class, cost in steps of a half
power of two, bucket of age), so that all of a shelf are worth the same; a heap of shelves says which is worth
least. Blocks move to the next shelf when they are old enough. Shelves are bounded in number, and each block moves at
most once per bucket.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic

from penstock.kv.policies.base import BlockT, Candidate, Outlook
from penstock.kv.policies.cost import PrefillCost
from penstock.kv.policies.reuse import BUCKETS, EDGES, ReuseTimes, bucket

_MOST_USES = 5
_MOST_TURNS = 3
_LEARN_EVERY = 256
"""Intervals between two looks at what was learned."""
_REMEMBERED = 1 << 16
_SLACK = 64
_LEAST_LEVEL, _MOST_LEVEL = -40, 20


class _Offer(Generic[BlockT]):
    """A block on a shelf; `block` is None when it was taken off it."""

    __slots__ = ("block", "order", "shelf")

    def __init__(self, block: BlockT, order: int) -> None:
        self.block: BlockT | None = block
        self.order = order


class _Shelf(Generic[BlockT]):
    """Offers that are worth the same: a heap by time of use."""

    __slots__ = ("age", "group", "heap", "level", "listed", "worth")

    def __init__(self, group: int, level: int, age: int) -> None:
        self.group = group
        self.level = level
        self.age = age
        self.worth = 0.0
        self.listed = False
        self.heap: list[tuple[float, int, _Offer[BlockT]]] = []


class Worth(Generic[BlockT]):
    """See the module's text. O(log n) per call, amortised; memory: about 0.2 KiB per block on offer."""

    def __init__(self, clock: Callable[[], float], cost: PrefillCost | None = None) -> None:
        self._clock = clock
        self._cost = cost or PrefillCost()
        self._times = ReuseTimes(_MOST_TURNS + 1 + _MOST_USES)
        self._rates: list[list[float]] = []
        self._learned = 0
        self._shelves: dict[tuple[int, int, int], _Shelf[BlockT]] = {}
        self._by_age: list[list[_Shelf[BlockT]]] = [[] for _ in range(BUCKETS)]
        self._due = [0.0] * BUCKETS
        self._order: list[tuple[float, int, _Shelf[BlockT]]] = []
        self._gone: OrderedDict[bytes, int] = OrderedDict()
        self._offers = self._stale = 0
        self._count = 0
        self._learn(clock())

    def __len__(self) -> int:
        return self._offers

    def stored(self, block: BlockT) -> None:
        """See EvictionPolicy."""
        before = self._gone.pop(block.key, None)
        if before is not None:
            block.uses += before + 1
        self._times.use(block.key, _group(block, block.uses), block.used_at)

    def removed(self, block: BlockT) -> None:
        """See EvictionPolicy."""
        self._gone[block.key] = block.uses
        while len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)

    def used(self, block: BlockT) -> None:
        """See EvictionPolicy."""
        self._times.use(block.key, _group(block, block.uses + 1), self._clock())

    def expect(self, conversation: str, outlook: Outlook) -> None:
        """See EvictionPolicy."""

    def offer(self, block: BlockT) -> None:
        """See EvictionPolicy."""
        self.withdraw(block)
        self._count += 1
        block.note = offer = _Offer(block, self._count)
        self._offers += 1
        seconds = block.seconds or self._cost.seconds(block.first_token, 1)
        level = round(2 * math.log2(seconds)) if seconds > 0 else _LEAST_LEVEL
        level = min(_MOST_LEVEL, max(_LEAST_LEVEL, level))
        age = bucket(self._clock() - block.used_at)
        self._put(offer, block, self._shelf(_group(block, block.uses), level, age))

    def withdraw(self, block: BlockT) -> None:
        """See EvictionPolicy."""
        offer: _Offer[BlockT] | None = block.note
        if offer is not None:
            offer.block = block.note = None
            self._offers -= 1
            self._stale += 1
            if self._stale > 2 * self._offers + _SLACK:
                self._tidy()

    def victim(self) -> BlockT | None:
        """See EvictionPolicy."""
        now = self._clock()
        self._age(now)
        if self._times.learned - self._learned >= _LEARN_EVERY:
            self._learn(now)
        while self._order:
            shelf = self._order[0][2]
            while shelf.heap:
                offer = heapq.heappop(shelf.heap)[2]
                block = offer.block
                if block is not None:
                    block.note = None
                    self._offers -= 1
                    return block
                self._stale -= 1
            heapq.heappop(self._order)
            shelf.listed = False
        return None

    # -- shelves

    def _shelf(self, group: int, level: int, age: int) -> _Shelf[BlockT]:
        shelf = self._shelves.get((group, level, age))
        if shelf is None:
            shelf = self._shelves[group, level, age] = _Shelf(group, level, age)
            shelf.worth = self._worth(shelf)
            self._by_age[age].append(shelf)
        return shelf

    def _worth(self, shelf: _Shelf[BlockT]) -> float:
        worth: float = self._rates[shelf.group][shelf.age] * 2.0 ** (shelf.level / 2)
        return worth

    def _put(self, offer: _Offer[BlockT], block: BlockT, shelf: _Shelf[BlockT]) -> None:
        heapq.heappush(shelf.heap, (block.used_at, offer.order, offer))
        if not shelf.listed:
            self._list(shelf)

    def _list(self, shelf: _Shelf[BlockT]) -> None:
        shelf.listed = True
        self._count += 1
        heapq.heappush(self._order, (shelf.worth, self._count, shelf))

    def _age(self, now: float) -> None:
        """Moves blocks that have grown older to their next shelf. Each shelf is looked at when its bucket says so."""
        for age in range(BUCKETS - 1):
            if now < self._due[age]:
                continue
            self._due[age] = now + (EDGES[age + 1] - EDGES[age]) / 4
            limit = now - EDGES[age + 1]
            for shelf in self._by_age[age]:
                heap = shelf.heap
                while heap and heap[0][0] <= limit:
                    _, _, offer = heapq.heappop(heap)
                    if offer.block is None:
                        self._stale -= 1
                    else:
                        target = self._shelf(shelf.group, shelf.level, bucket(now - offer.block.used_at))
                        self._put(offer, offer.block, target)

    def _tidy(self) -> None:
        """Drops what was taken off the shelves."""
        self._stale = 0
        for shelf in self._shelves.values():
            shelf.heap = [entry for entry in shelf.heap if entry[2].block is not None]
            heapq.heapify(shelf.heap)

    def _learn(self, now: float) -> None:
        """Takes over what the tracker has learned: all shelves are worth something else now."""
        self._learned = self._times.learned
        self._rates = self._times.rates(now)
        self._order = []
        for shelf in self._shelves.values():
            shelf.worth = self._worth(shelf)
            shelf.listed = False
            if shelf.heap:
                self._list(shelf)


def _group(block: Candidate, uses: int) -> int:
    """The class of a block: by uses; those not used again yet by turns of their conversation."""
    return _MOST_TURNS + min(uses, _MOST_USES) if uses else min(block.turn, _MOST_TURNS)
