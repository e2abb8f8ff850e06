"""Who may have one of a few threads now, for work that may take as long as it likes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

_LATELY_S = 60.0


class Seats:
    """No tenant has more than a few places, and all who took long lately have a single one together. So whoever did
    not finds a place, unless many begin to take long at the same moment. Belongs to one event loop."""

    def __init__(self, *, at_once: int, long_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """A tenant has at most `at_once` places; longer than `long_s` is long."""
        self._at_once = at_once
        self._long_s = long_s
        self._clock = clock
        self._slow = asyncio.Semaphore()
        self._slow_until: dict[str, float] = {}
        self._own: dict[str, asyncio.Semaphore] = {}
        self._here: Counter[str] = Counter()
        """Who has a place or waits for one, by tenant."""

    async def take(self, tenant: str) -> Callable[[], None]:
        """A place, as soon as there is one; the caller owes one call of what it gets."""
        with ExitStack() as place:
            self._here[tenant] += 1
            place.callback(self._leave, tenant)
            for line in self._lines(tenant):
                await line.acquire()
                place.callback(line.release)
            place.callback(self._note, tenant, self._clock())
            return place.pop_all().close

    def _lines(self, tenant: str) -> Iterator[asyncio.Semaphore]:
        """Where a tenant stands, one behind the other."""
        yield self._own.setdefault(tenant, asyncio.Semaphore(self._at_once))
        if self._clock() < self._slow_until.get(tenant, 0.0):
            yield self._slow

    def _leave(self, tenant: str) -> None:
        self._here[tenant] -= 1
        if not self._here[tenant]:
            del self._here[tenant], self._own[tenant]

    def _note(self, tenant: str, began: float) -> None:
        now = self._clock()
        if now - began > self._long_s:
            self._slow_until[tenant] = now + _LATELY_S
        elif now >= self._slow_until.get(tenant, 0.0):
            self._slow_until.pop(tenant, None)
