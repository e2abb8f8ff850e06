"""Keeps a tenant that has more than its share from pushing out others, whatever the eviction policy ranks first."""

from __future__ import annotations

import heapq
from typing import Generic

from penstock.kv.eviction.base import EvictionPolicy, OwnedT
from penstock.kv.eviction.lru import Lru
from penstock.kv.hint import ReturnHint

_SLACK = 64


class TenantShares(Generic[OwnedT]):
    """An EvictionPolicy around another one.

    While tenants hold more than `share` of the blocks, only their blocks go: the inner policy's victim if it is one of
    theirs, else the longest unused block of the tenant that holds most, as far as any may go. A share is of the most
    blocks that there were, which is the room once something has to go. A victim counts as gone, unless it is offered
    again. Who wants some blocks only to count says which, and tells the inner policy of those that are stored, used and
    removed.

    At most 1 / `share` tenants can be over it, so a victim costs that and O(log n), amortised.
    """

    def __init__(self, inner: EvictionPolicy[OwnedT], share: float) -> None:
        self._inner = inner
        self._share = share
        self._offers: dict[bytes, Lru[OwnedT]] = {}
        self._counted: dict[bytes, bytes] = {}
        """The tenant of each counted block, by key."""
        self._counts: dict[bytes, int] = {}
        self._most = 0
        """Blocks that were counted at a time."""
        self._largest: list[tuple[int, bytes]] = []
        """A heap of (minus the count, tenant); entries whose count has changed since are out of date."""

    def __len__(self) -> int:
        return len(self._inner)

    def block_stored(self, block: OwnedT) -> None:
        """Counts the new block."""
        self.count_in(block)
        self._inner.block_stored(block)

    def block_removed(self, block: OwnedT) -> None:
        """The block counts no more."""
        self.count_out(block)
        self._inner.block_removed(block)

    def block_used(self, block: OwnedT) -> None:
        """Passes the use to the inner policy."""
        self._inner.block_used(block)

    def expect_session(self, session: str, outlook: ReturnHint) -> None:
        """Passes the hint to the inner policy."""
        self._inner.expect_session(session, outlook)

    def offer_block(self, block: OwnedT) -> None:
        """Offers the block to the inner policy, and as one of its tenant's; a victim that was spared counts again."""
        self.count_in(block)
        self._offers.setdefault(block.namespace, Lru()).offer_block(block)
        self._inner.offer_block(block)

    def withdraw_block(self, block: OwnedT) -> None:
        """Withdraws the block from both orders."""
        self._take(block)
        self._inner.withdraw_block(block)

    def next_victim(self) -> OwnedT | None:
        """Takes out a block of a tenant that holds more than its share; if none may go, the inner policy's victim."""
        victim = self._inner.next_victim()
        if victim is None:
            return None
        if not self._is_over(victim.namespace) and (greedy := self._greediest()) is not None:
            self._inner.offer_block(victim)
            instead = self._offers[greedy].next_victim()
            assert instead is not None, "it has blocks on offer"
            self._inner.withdraw_block(instead)
            victim = instead
        self._take(victim)
        self.count_out(victim)
        return victim

    def count_in(self, block: OwnedT) -> None:
        """The block counts from now on; a second call does nothing."""
        if block.key not in self._counted:
            self._counted[block.key] = block.namespace
            self._most = max(self._most, len(self._counted))
            self._change(block.namespace, 1)

    def count_out(self, block: OwnedT) -> None:
        """The block counts no more, until it is offered or counted again; a second call does nothing."""
        if self._counted.pop(block.key, None) is not None:
            self._change(block.namespace, -1)

    def _is_over(self, tenant: bytes) -> bool:
        return self._counts.get(tenant, 0) > self._share * self._most

    def _greediest(self) -> bytes | None:
        """The tenant with the most blocks of those that are over their share and have a block on offer."""
        seen = []
        found = None
        while found is None and self._largest:
            entry = heapq.heappop(self._largest)
            if -entry[0] != self._counts.get(entry[1]) or entry in seen:
                continue
            seen.append(entry)
            if not self._is_over(entry[1]):
                break
            if entry[1] in self._offers:
                found = entry[1]
        for entry in seen:
            heapq.heappush(self._largest, entry)
        return found

    def _take(self, block: OwnedT) -> None:
        offers = self._offers.get(block.namespace)
        if offers is not None:
            offers.withdraw_block(block)
            if not offers:
                del self._offers[block.namespace]

    def _change(self, tenant: bytes, by: int) -> None:
        count = self._counts.get(tenant, 0) + by
        if not count:
            del self._counts[tenant]
            return
        self._counts[tenant] = count
        heapq.heappush(self._largest, (-count, tenant))
        if len(self._largest) > 2 * len(self._counts) + _SLACK:
            self._largest = [(-each, name) for name, each in self._counts.items()]
            heapq.heapify(self._largest)
