"""Leases of blocks that are not in host memory yet.

A flight brings the missing blocks of one lease; another lease that misses one of them waits for the same flight.
A block is pinned, for every lease that waits for it, in the same step in which it becomes findable, so that nothing
can evict it in between. A flight ends when no lease waits for it any more: because their clients hung up, or, a moment
after the waiters' time limit, because none of them has come back for the rest. What has landed by then stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from penstock.kv.bytes.arena import Arena
from penstock.kvstore.table.blocks import Lease, TierKind
from penstock.kvstore.table.table import BlockTable
from penstock.kvstore.tiers.base import Room, Supplier
from penstock.runtime.tasks import Failed, end, start

_LINGER_S = 0.25
"""A flight that has brought something waits this long for its waiters to ask for the rest: ending it throws away what
is on its way, and on a slow link that is much."""
_LONGEST_S = 60.0
"""Of a flight, however many leases wait for it one after the other."""


class _Flight:
    """One bringing under way, and the leases that wait for it, each with all the keys it asked for."""

    def __init__(
        self,
        keys: Sequence[bytes],
        suppliers: Sequence[Supplier],
        until: float,
        begin: Callable[[_Flight], asyncio.Task[None]],
    ) -> None:
        """`begin` starts the task that brings; the task begins later."""
        self.keys = keys
        self.suppliers = suppliers
        self.until = until
        self.kind = TierKind.HOST
        self.waiting: dict[int, tuple[Lease, Sequence[bytes]]] = {}
        self.kept = False
        """Goes on when no lease waits."""
        self.useful = False
        """Something has landed."""
        self.task = begin(self)


class Bringer:
    """Has the suppliers bring the blocks that leases miss. `close` it when no lease can come any more."""

    def __init__(self, table: BlockTable, arena: Arena, now: Callable[[], float], failed: Failed) -> None:
        self._table = table
        self._arena = arena
        self._now = now
        self._flights: dict[bytes, _Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = failed
        self._closed = False

    @property
    def flights(self) -> int:
        """Bringings under way."""
        return len(self._tasks)

    async def idle(self) -> None:
        """Returns when nothing is being brought."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def fill(self, lease: Lease, keys: Sequence[bytes], suppliers: Sequence[Supplier], until: float) -> None:
        """Extends `lease` towards all of `keys`. Returns when it is complete, no more can come, or at `until`."""
        begin = len(lease.blocks)
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + until - self._now()):
                while await self._step(lease, keys, suppliers, until):
                    pass
        except TimeoutError:
            lease.more = begin < len(lease.blocks) < len(keys)

    async def prefetch(self, keys: Sequence[bytes], suppliers: Sequence[Supplier], until: float) -> None:
        """Brings blocks that no lease waits for yet. Cancelling it ends that, unless a lease waits by then."""
        flight = self._start(keys, suppliers, until)
        if flight is None:
            return
        flight.kept = True
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + until - self._now()):
                await asyncio.wait([flight.task])
        except TimeoutError:
            pass
        finally:
            flight.kept = False
            self._leave(flight)

    async def _step(self, lease: Lease, keys: Sequence[bytes], suppliers: Sequence[Supplier], until: float) -> bool:
        """Waits for flights until one has helped, or all of its own suppliers were asked; whether it helped and more is
        missing."""
        at = len(lease.blocks)
        if at == len(keys):
            return False
        asked: list[Supplier] = []
        while not asked or any(one not in asked for one in suppliers):  # others' flights may have asked others
            flight = self._flights.get(keys[at]) or self._start(keys[at:], suppliers, until)
            if flight is None:
                return False
            if await self._rode(flight, lease, keys, until):
                return True
            asked += flight.suppliers
        return False

    async def _rode(self, flight: _Flight, lease: Lease, keys: Sequence[bytes], until: float) -> bool:
        """Waits for a flight; whether it has extended the lease."""
        at = len(lease.blocks)
        await self._wait(flight, lease, keys, until)
        self._table.leases.extend(lease, keys, TierKind.HOST, self._now())
        return len(lease.blocks) > at

    async def _wait(self, flight: _Flight, lease: Lease, keys: Sequence[bytes], until: float) -> None:
        flight.waiting[lease.lease_id] = lease, keys
        try:
            await asyncio.wait([flight.task])
        finally:
            del flight.waiting[lease.lease_id]
            if flight.useful and self._now() >= until and not self._closed:
                asyncio.get_running_loop().call_later(_LINGER_S, self._leave, flight)
            else:
                self._leave(flight)

    def _leave(self, flight: _Flight) -> None:
        """Ends a flight that no lease waits for."""
        if not flight.waiting and not flight.kept:
            self._forget(flight)
            flight.task.cancel()

    def _start(self, keys: Sequence[bytes], suppliers: Sequence[Supplier], until: float) -> _Flight | None:
        if self._closed or not any(supplier.has_blocks(keys[:1]) for supplier in suppliers):
            return None

        def begin(flight: _Flight) -> asyncio.Task[None]:
            job = partial(self._fly, flight)
            return start(job, name="bringing", on_failure="log", failed=self._failed)

        flight = _Flight(keys, suppliers, until + _LONGEST_S, begin)
        self._flights.update((key, flight) for key in keys if key not in self._flights)
        self._tasks.add(flight.task)
        flight.task.add_done_callback(lambda task: self._over(flight, task))
        return flight

    async def _fly(self, flight: _Flight) -> None:
        room, at = Room(self._table, self._arena, self._now, lambda: self._landed(flight)), 0
        try:
            while got := self._table.lookup(flight.keys[at:]) or await self._some(flight, at, room):
                at += got
        finally:
            room.close()

    async def _some(self, flight: _Flight, at: int, room: Room) -> int:
        """The next blocks from the first supplier that brings any."""
        for supplier in flight.suppliers:
            rest = flight.keys[at:]
            count = supplier.has_blocks(rest)
            if not count:
                continue
            flight.kind = supplier.kind
            if got := await supplier.bring_blocks(rest[:count], room, flight.until):
                return got
        return 0

    def _landed(self, flight: _Flight) -> None:
        flight.useful = True
        for lease, keys in flight.waiting.values():
            self._table.leases.extend(lease, keys, flight.kind, self._now())

    def _over(self, flight: _Flight, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._forget(flight)

    def _forget(self, flight: _Flight) -> None:
        for key in flight.keys:
            if self._flights.get(key) is flight:
                del self._flights[key]

    async def close(self) -> None:
        """Cancels all flights, and returns when they have ended; no block is brought afterwards."""
        self._closed = True
        await end(*self._tasks)
