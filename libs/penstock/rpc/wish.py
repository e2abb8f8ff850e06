"""What a worker wants of its routers: one for all of its joins, each of which tells its router what is new."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from penstock.v1 import router_pb2


class WorkWanted(NamedTuple):
    """The work that a worker wants."""

    role: router_pb2.Role.ValueType
    draining: bool = False
    """No new work."""
    ends: bool = False
    """It ends when nothing runs any more."""


class WorkerWish:
    """Owner of what one worker wants."""

    def __init__(self, role: router_pb2.Role.ValueType) -> None:
        self.now = WorkWanted(role)
        self._changed = asyncio.Event()

    def take(self, role: router_pb2.Role.ValueType) -> None:
        """It wants work of this kind."""
        self._set(self.now._replace(role=role))

    def drain(self, draining: bool = True, *, ends: bool = False) -> None:
        """It wants nothing new, or something again; it `ends` when nothing runs any more."""
        self._set(self.now._replace(draining=draining, ends=draining and ends))

    async def other_than(self, known: WorkWanted) -> WorkWanted:
        """What it wants, as soon as that is not what is `known`."""
        while self.now == known:
            await self._changed.wait()
        return self.now

    def _set(self, wanted: WorkWanted) -> None:
        if wanted != self.now:
            self.now = wanted
            self._changed.set()
            self._changed = asyncio.Event()
