"""Eviction with knowledge of the future: a bound that no real policy can reach.

`farthest`: Belady's rule, the block whose next use is farthest goes first. A block's next use is never before its
parent's, so the rule never wants to break a chain, and it evicts from the ends of chains like every policy. Where
nothing is leased it loses the fewest block hits that any schedule can lose: the exact optimum for the block hit rate.

`seconds`: the block whose next use saves the fewest seconds per second of waiting for it goes first. Optimal eviction
with unequal costs needs a min-cost flow over the whole trace; this greedy schedule is a feasible one, so the
seconds it saves are a lower bound of the optimum. The better of the two schedules stands in the tables.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from typing import Literal

from penstock.kv.cost import PrefillCost
from penstock.kv.hint import ReturnHint
from penstock.kvstore.table.blocks import Block
from penstock.traces.reading import Trace

Rule = Literal["farthest", "seconds"]
_SLACK = 64


class Future:
    """When each block is used, by the number of the request."""

    def __init__(self, trace: Trace) -> None:
        self._uses: dict[bytes, list[int]] = defaultdict(list)
        for number, ask in enumerate(trace.asks):
            for key in ask.keys:
                self._uses[key].append(number)
        self._at = [ask.at for ask in trace.asks]

    def next_use(self, key: bytes, number: int) -> float:
        """Number of the first request after `number` that names the block; infinity when no later one does."""
        uses = self._uses[key]
        place = bisect_right(uses, number)
        return uses[place] if place < len(uses) else math.inf

    def wait(self, key: bytes, number: int) -> float:
        """Seconds from request `number` to the next use of the block; infinity when it is not used again."""
        following = self.next_use(key, number)
        return self._at[int(following)] - self._at[number] if following < math.inf else math.inf


class Clairvoyant:
    """An EvictionPolicy that knows the future. `number` says which request runs."""

    def __init__(self, future: Future, rule: Rule, cost: PrefillCost, number: Callable[[], int]) -> None:
        self._future = future
        self._cost = cost
        self._rank = self._farthest if rule == "farthest" else self._seconds
        self._number = number
        self._heap: list[tuple[float, int, int, Block]] = []
        self._current: dict[bytes, tuple[float, int, int, Block]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._current)

    def block_stored(self, block: Block) -> None:
        """Does nothing: the trace already tells every use."""

    def block_removed(self, block: Block) -> None:
        """Does nothing: the trace already tells every use."""

    def block_used(self, block: Block) -> None:
        """Does nothing: the trace already tells every use."""

    def expect_session(self, session: str, outlook: ReturnHint) -> None:
        """Does nothing: the trace already tells every use."""

    def offer_block(self, block: Block) -> None:
        """Ranks the block as of the running request, in O(log n) amortised; a new offer replaces the earlier one."""
        self._count += 1
        entry = (self._rank(block), -block.first_token, self._count, block)
        self._current[block.key] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)

    def withdraw_block(self, block: Block) -> None:
        """Forgets the block in O(1) and ignores unknown ones; its heap entry is dropped later."""
        self._current.pop(block.key, None)

    def next_victim(self) -> Block | None:
        """Removes and returns the block that the rule ranks first, the later one of equals; None when none may go."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._current.get(entry[3].key) is entry:
                del self._current[entry[3].key]
                return entry[3]
        return None

    def _farthest(self, block: Block) -> float:
        return -self._future.next_use(block.key, self._number())

    def _seconds(self, block: Block) -> float:
        wait = self._future.wait(block.key, self._number())
        return self._cost.seconds(block.first_token, 1) / max(wait, 1e-3)
