"""Who comes next where tenants wait for few helpers: they take turns, and none has all helpers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Generic, TypeVar

from penstock.errors import Overloaded

Job = TypeVar("Job")


class Turns(Generic[Job]):
    """Jobs of tenants, given out in turns. Belongs to one event loop."""

    def __init__(self, *, at_once: int, most: int) -> None:
        """A tenant has at most `at_once` jobs given out, and at most `most` that wait."""
        self._at_once = at_once
        self._most = most
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        self._out: dict[str, int] = {}
        self._changed = asyncio.Event()

    def put(self, tenant: str, job: Job) -> None:
        """Adds a job. Raises Overloaded when too many of the tenant's wait."""
        line = self._waiting.setdefault(tenant, deque())
        if len(line) >= self._most:
            raise Overloaded("too many new schemas and grammars wait to be compiled; try again later", retry_after=1)
        line.append(job)
        self._changed.set()

    async def next(self) -> tuple[str, Job]:
        """Waits for the next job; its tenant is to be told to `done`."""
        while True:
            for tenant, line in self._waiting.items():
                if self._out.get(tenant, 0) < self._at_once:
                    job = line.popleft()
                    del self._waiting[tenant]
                    if line:
                        self._waiting[tenant] = line  # behind the others
                    self._out[tenant] = self._out.get(tenant, 0) + 1
                    return tenant, job
            self._changed.clear()
            await self._changed.wait()

    def done(self, tenant: str) -> None:
        """A job of the tenant has ended."""
        self._out[tenant] -= 1
        if not self._out[tenant]:
            del self._out[tenant]
        self._changed.set()
