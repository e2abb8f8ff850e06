"""The order in which requests of several tenants are served: start-time fair queueing, after Goyal, Vin and Cheng,
"Start-time Fair Queueing" (SIGCOMM 1996).

Every tenant has a tag: the virtual time at which its next request starts. The lowest tag is served first, and moves on
by what the request costs over the tenant's weight. Virtual time is the tag that was served last; a tenant that had
nothing waiting begins there, so it neither saves up what it did not use nor pays for what it used when nobody else
waited. A request is charged when it is served, so that what it costs may be known as late as then.

Within a tenant the lowest rank is first. With arrival plus priority as rank, a priority is worth some seconds of
waiting, and nothing waits for ever.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

Item = TypeVar("Item")

_MOST_REMEMBERED = 1024
"""Tenants with nothing waiting whose tags are kept."""
_rank = attrgetter("rank", "number")


@dataclass(slots=True, eq=False)
class Entry(Generic[Item]):
    """One request that waits."""

    item: Item
    tenant: str
    rank: float
    cost: float
    """What serving it is thought to cost, in tokens."""
    number: int
    """Order of arrival."""


@dataclass(slots=True)
class _Flow(Generic[Item]):
    """The requests of one tenant."""

    start: float
    weight: float
    entries: list[Entry[Item]] = field(default_factory=list)
    """By rank."""
    cost: float = 0.0
    """Of all of them."""


class FairQueue(Generic[Item]):
    """Owner of the line. Pure: no clock, and it never drops anything by itself."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[Item]] = {}
        """Of the tenants that have something waiting."""
        self._finished: dict[str, float] = {}
        """Tags of the others, as far as they are ahead of virtual time."""
        self._time = 0.0
        self._count = 0
        self._next = 0

    def __len__(self) -> int:
        return self._count

    def push(self, item: Item, tenant: str, *, rank: float, cost: float, weight: float = 1.0) -> Entry[Item]:
        """Adds a request; `weight` is the tenant's from now on."""
        flow = self._flows.get(tenant)
        if flow is None:
            flow = self._flows[tenant] = _Flow(max(self._time, self._finished.pop(tenant, 0.0)), weight)
        flow.weight = weight
        self._next += 1
        entry = Entry(item, tenant, rank, cost, self._next)
        insort(flow.entries, entry, key=_rank)
        flow.cost += cost
        self._count += 1
        return entry

    def order(self) -> Iterator[Entry[Item]]:
        """All that wait, in the order in which they would be served at the costs that are thought. Not to be used any
        further when something has changed."""
        heads = [(flow.start, flow.entries[0].number, tenant, 0) for tenant, flow in self._flows.items()]
        heapq.heapify(heads)
        while heads:
            start, _, tenant, at = heads[0]
            flow = self._flows[tenant]
            entry = flow.entries[at]
            yield entry
            if at + 1 < len(flow.entries):
                start += entry.cost / flow.weight
                heapq.heapreplace(heads, (start, flow.entries[at + 1].number, tenant, at + 1))
            else:
                heapq.heappop(heads)

    def serve(self, entry: Entry[Item], cost: float) -> None:
        """Takes a request out, which is served, at what that really costs."""
        flow = self._flows[entry.tenant]
        self._time = max(self._time, flow.start)
        flow.start += cost / flow.weight
        self.remove(entry)

    def remove(self, entry: Entry[Item]) -> None:
        """Takes a request out, which is not served."""
        flow = self._flows[entry.tenant]
        flow.entries.remove(entry)
        flow.cost -= entry.cost
        self._count -= 1
        if not flow.entries:
            del self._flows[entry.tenant]
            self._remember(entry.tenant, flow.start)

    def waiting(self, tenant: str) -> int:
        """How many requests of a tenant wait."""
        flow = self._flows.get(tenant)
        return len(flow.entries) if flow else 0

    def ahead(self, tenant: str, rank: float, weight: float = 1.0) -> float:
        """About how many tokens would be served before a request of that rank, if it came now: those of its tenant
        before it and, of each other's, no more than the tenant's share of the same time is worth."""
        flow = self._flows.get(tenant)
        start = flow.start if flow else max(self._time, self._finished.get(tenant, 0.0))
        own = sum(entry.cost for entry in flow.entries if entry.rank <= rank) if flow else 0.0
        until = start + own / weight
        others = (
            min(other.cost, max(0.0, until - other.start) * other.weight + other.entries[0].cost)
            for name, other in self._flows.items()
            if name != tenant and other.start <= until
        )
        return own + sum(others)

    def surplus(self) -> Entry[Item]:
        """The one to do without: the last of the tenant that has most waiting for its weight."""
        flow = max(self._flows.values(), key=lambda flow: len(flow.entries) / flow.weight)
        return flow.entries[-1]

    def _remember(self, tenant: str, start: float) -> None:
        if not self._count:  # a busy time is over: nobody owes anybody anything
            self._finished.clear()
            self._time = 0.0
        elif start > self._time:
            self._finished[tenant] = start
            if len(self._finished) > _MOST_REMEMBERED:
                ahead = {name: tag for name, tag in self._finished.items() if tag > self._time}
                self._finished = dict(heapq.nlargest(_MOST_REMEMBERED // 2, ahead.items(), key=lambda pair: pair[1]))
