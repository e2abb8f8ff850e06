"""Who may have one of a few threads now, for work that may take as long as it likes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

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

    @asynccontextmanager
    async def one(self, tenant: str) -> AsyncIterator[None]:
        """A place for the length of the block, as soon as there is one."""
        self._here[tenant] += 1
        try:
            async with AsyncExitStack() as place:
                await place.enter_async_context(self._own.setdefault(tenant, asyncio.Semaphore(self._at_once)))
                if self._clock() < self._slow_until.get(tenant, 0.0):
                    await place.enter_async_context(self._slow)
                began = self._clock()
                try:
                    yield
                finally:
                    self._note(tenant, self._clock() - began)
        finally:
            self._here[tenant] -= 1
            if not self._here[tenant]:
                del self._here[tenant], self._own[tenant]

    def _note(self, tenant: str, took_s: float) -> None:
        now = self._clock()
        if took_s > self._long_s:
            self._slow_until[tenant] = now + _LATELY_S
        elif now >= self._slow_until.get(tenant, 0.0):
            self._slow_until.pop(tenant, None)
