"""Evicts the block that is worth least: seconds of prefill saved x rate of reuse, per byte.

All blocks of a table have the same number of bytes, so bytes need no factor. The rate is learned, see `reuse`. Its
classes are those that an opaque block shows: how often it was used, and whether a session went on when it was
stored. A hint about the block's session takes precedence over the learned rate: a session that has ended is worth
little, one that is expected back at a time is worth its seconds per second of waiting for it.

The leaf of a chain is the last to be computed and the dearest (attention); once it is gone its parent, with the same
chance of reuse, is a little cheaper, and so the next victim. So chains go one after the other, each from its end.

Finding the victim does not look at blocks. Those on offer stand on shelves, one per (class, cost in steps of a half
power of two, bucket of age or of waiting), so that all of a shelf are worth the same; a heap of shelves says which is
worth least. Blocks move to another shelf when their time has come. Shelves are bounded in number, and a block moves
at most once per bucket.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic

from penstock.kv.cost import PrefillCost
from penstock.kv.eviction.base import SEVERAL, BlockT, Evictable
from penstock.kv.eviction.reuse import BUCKETS, EDGES, ReuseTimes, bucket
from penstock.kv.hint import ReturnHint

_MOST_USES = 5
_MOST_TURNS = 3
_GROUPS = _MOST_TURNS + 1 + _MOST_USES
_ENDED = _GROUPS
"""The shelves of classes from here on are those of sessions that have ended."""
_WAITING = 2 * _GROUPS
"""The class of blocks whose session is expected back."""
_ENDED_FACTOR = 1 / 64
"""Of the usual rate."""
_RETURNS = 0.8
"""How many expected sessions come back."""
_LEARN_SOONEST, _LEARN_LATEST = 64, 2048
"""Uses between two looks at what was learned: an eighth of all so far, within these bounds."""
_REMEMBERED = 1 << 16
"""Keys and sessions that are remembered."""
_SLACK = 64
_LEAST_LEVEL, _MOST_LEVEL = -40, 20


class _Offer(Generic[BlockT]):
    """A block on a shelf; `block` is None when it was taken off it."""

    __slots__ = ("block", "order", "owner")

    def __init__(self, block: BlockT, order: int) -> None:
        self.block: BlockT | None = block
        self.owner = block.session if block.session != SEVERAL else ""
        self.order = order


class _Shelf(Generic[BlockT]):
    """Offers that are worth the same: a heap by the time when they move on."""

    __slots__ = ("group", "heap", "level", "listed", "step", "worth")

    def __init__(self, group: int, level: int, step: int) -> None:
        self.group = group
        self.level = level
        self.step = step
        """A bucket of time: since the last use or, of the class _WAITING, until the next."""
        self.worth = 0.0
        self.listed = False
        self.heap: list[tuple[float, int, _Offer[BlockT]]] = []


class Worth(Generic[BlockT]):
    """The policy that the module's text describes. Each call costs O(log n), amortised."""

    def __init__(self, clock: Callable[[], float], cost: PrefillCost | None = None) -> None:
        self._clock = clock
        self._cost = cost or PrefillCost()
        self._times = ReuseTimes(_GROUPS)
        self._rates: list[list[float]] = []
        self._learn_at = 0
        self._shelves: dict[tuple[int, int, int], _Shelf[BlockT]] = {}
        self._by_step: list[list[_Shelf[BlockT]]] = [[] for _ in range(BUCKETS)]
        self._due = [0.0] * (BUCKETS - 1)
        self._soonest = 0.0
        self._order: list[tuple[float, int, _Shelf[BlockT]]] = []
        self._gone: OrderedDict[bytes, int] = OrderedDict()
        self._outlooks: OrderedDict[str, ReturnHint] = OrderedDict()
        self._owned: dict[str, dict[bytes, BlockT]] = {}
        """Blocks on offer, by the session they belong to."""
        self._offers = self._stale = self._count = 0
        self._learn(clock())

    def __len__(self) -> int:
        return self._offers

    def block_stored(self, block: BlockT) -> None:
        """A block that comes back after an eviction has the uses that it had then, and one more. One that comes from
        another tier brings a count of the same uses: the larger one holds. Records the use for the learned rates."""
        before = self._gone.pop(block.key, None)
        if before is not None:
            block.uses = max(block.uses, before + 1)
        self._times.use(block.key, _group(block), block.used_at)

    def block_removed(self, block: BlockT) -> None:
        """Remembers how often the block was used, for the 65,536 blocks that left last."""
        self._gone[block.key] = block.uses
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)

    def block_used(self, block: BlockT) -> None:
        """Records the use for the learned rates."""
        self._times.use(block.key, _group(block), block.used_at)

    def expect_session(self, session: str, outlook: ReturnHint) -> None:
        """Remembers the hint, for 65,536 sessions at most, and offers each block of the session again."""
        self._outlooks.pop(session, None)
        if outlook.ended or outlook.returns_at is not None:
            self._outlooks[session] = outlook
            if len(self._outlooks) > _REMEMBERED:
                self._outlooks.popitem(last=False)
        for block in list(self._owned.get(session, {}).values()):
            self.offer_block(block)

    def offer_block(self, block: BlockT) -> None:
        """Puts the block on the shelf of its class, cost and age, or moves it there from the shelf it was on."""
        self.withdraw_block(block)
        self._count += 1
        block.note = offer = _Offer(block, self._count)
        self._offers += 1
        if offer.owner:
            self._owned.setdefault(offer.owner, {})[block.key] = block
        self._put(offer, block, self._clock())

    def withdraw_block(self, block: BlockT) -> None:
        """Takes the block off its shelf, and drops stale entries once they outnumber the offers two to one."""
        if block.note is not None:
            self._stale += 1
            self._take(block)
            if self._stale > 2 * self._offers + _SLACK:
                self._tidy()

    def next_victim(self) -> BlockT | None:
        """Takes a block from the shelf that is worth least, after moving due blocks and adopting what was learned."""
        now = self._clock()
        self._move(now)
        if self._times.learned >= self._learn_at:
            self._learn(now)
        while self._order:
            shelf = self._order[0][2]
            while shelf.heap:
                block = heapq.heappop(shelf.heap)[2].block
                if block is not None:
                    self._take(block)
                    return block
                self._stale -= 1
            heapq.heappop(self._order)
            shelf.listed = False
        return None

    def _take(self, block: BlockT) -> None:
        offer: _Offer[BlockT] = block.note
        offer.block = block.note = None
        self._offers -= 1
        if offer.owner:
            owned = self._owned[offer.owner]
            del owned[block.key]
            if not owned:
                del self._owned[offer.owner]

    # -- shelves

    def _put(self, offer: _Offer[BlockT], block: BlockT, now: float) -> None:
        """Onto the shelf where the block belongs now, until it has to move on."""
        seconds = block.seconds or self._cost.seconds(block.first_token, 1)
        level = round(2 * math.log2(seconds)) if seconds > 0 else _LEAST_LEVEL
        group, step, until = self._stand(block, now)
        shelf = self._shelf(group, min(_MOST_LEVEL, max(_LEAST_LEVEL, level)), step)
        heapq.heappush(shelf.heap, (until, offer.order, offer))
        if not shelf.listed:
            self._list(shelf)

    def _stand(self, block: BlockT, now: float) -> tuple[int, int, float]:
        """Class, bucket, and when that changes."""
        group = _group(block)
        outlook = self._outlooks.get(block.session) if self._outlooks else None
        if outlook is not None and outlook.returns_at is not None and not outlook.ended:
            # Expectations are vague: one is not worth more than at half of the whole wait, and holds for twice of it.
            whole = max(0.0, outlook.returns_at - block.used_at)
            left = outlook.returns_at - now
            if left > -whole:
                step = bucket(max(left, whole / 2))
                return (
                    _WAITING,
                    step,
                    outlook.returns_at + (-EDGES[step] if left > max(EDGES[step], whole / 2) else whole),
                )
        elif outlook is not None:
            group += _ENDED
        step = bucket(now - block.used_at)
        return group, step, block.used_at + EDGES[step + 1] if step + 1 < BUCKETS else math.inf

    def _shelf(self, group: int, level: int, step: int) -> _Shelf[BlockT]:
        shelf = self._shelves.get((group, level, step))
        if shelf is None:
            shelf = self._shelves[group, level, step] = _Shelf(group, level, step)
            shelf.worth = self._worth(shelf)
            self._by_step[step].append(shelf)
        return shelf

    def _worth(self, shelf: _Shelf[BlockT]) -> float:
        if shelf.group == _WAITING:
            rate = _RETURNS / EDGES[shelf.step + 1] if shelf.step + 1 < BUCKETS else 0.0
        elif shelf.group >= _ENDED:
            rate = _ENDED_FACTOR * self._rates[shelf.group - _ENDED][shelf.step]
        else:
            rate = self._rates[shelf.group][shelf.step]
        worth: float = rate * 2.0 ** (shelf.level / 2)
        return worth

    def _list(self, shelf: _Shelf[BlockT]) -> None:
        shelf.listed = True
        self._count += 1
        heapq.heappush(self._order, (shelf.worth, self._count, shelf))

    def _move(self, now: float) -> None:
        """Moves blocks on whose time has come. How often a shelf is looked at depends on the width of its bucket."""
        if now < self._soonest:
            return
        for step in range(BUCKETS - 1):
            if now < self._due[step]:
                continue
            self._due[step] = now + (EDGES[step + 1] - EDGES[step]) / 4
            for shelf in list(self._by_step[step]):
                due = []
                while shelf.heap and shelf.heap[0][0] <= now:
                    due.append(heapq.heappop(shelf.heap)[2])
                for offer in due:
                    if offer.block is None:
                        self._stale -= 1
                    else:
                        self._put(offer, offer.block, now)
        self._soonest = min(self._due)

    def _tidy(self) -> None:
        """Drops the heap entries of blocks that were taken off the shelves."""
        self._stale = 0
        for shelf in self._shelves.values():
            shelf.heap = [entry for entry in shelf.heap if entry[2].block is not None]
            heapq.heapify(shelf.heap)

    def _learn(self, now: float) -> None:
        """Takes over what the tracker has learned: all shelves are worth something else now."""
        learned = self._times.learned
        self._learn_at = learned + max(_LEARN_SOONEST, min(learned // 8, _LEARN_LATEST))
        self._rates = self._times.rates(now)
        self._order = []
        for shelf in self._shelves.values():
            shelf.worth = self._worth(shelf)
            shelf.listed = False
            if shelf.heap:
                self._list(shelf)


def _group(block: Evictable) -> int:
    """The class of a block: by uses; those not used again yet by turns of their session."""
    return _MOST_TURNS + min(block.uses, _MOST_USES) if block.uses else min(block.turn, _MOST_TURNS)
