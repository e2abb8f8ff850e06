"""The asks of one stream that wait for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from penstock.runtime.tasks import beside
from penstock.v1 import draft_pb2

_MOST = 8
"""Asks in line; while it is full none is read, and the worker that sends them has to wait."""


class Backlog:
    """Asks in the order in which they came. A worker that asks faster than it is answered gets one answer for many."""

    def __init__(self) -> None:
        self._line: asyncio.Queue[draft_pb2.DraftAsk | None] = asyncio.Queue(_MOST)
        self._over = False

    async def read(self, requests: AsyncIterator[draft_pb2.DraftAsk]) -> None:
        """Takes asks in until there will be no more."""
        async for request in requests:
            await self._line.put(request)
        await self._line.put(None)

    async def take(self) -> list[draft_pb2.DraftAsk]:
        """All that have come since the last call, at least one; an empty list when there will be no more."""
        if self._over:
            return []
        taken = [await self._line.get()]
        while not self._line.empty():
            taken.append(self._line.get_nowait())
        self._over = taken[-1] is None
        return [ask for ask in taken if ask is not None]


@asynccontextmanager
async def open_backlog(
    requests: AsyncIterator[draft_pb2.DraftAsk], failed: Callable[[str], object]
) -> AsyncIterator[Backlog]:
    """A backlog that is filled for the length of the block."""
    backlog = Backlog()
    async with beside(partial(backlog.read, requests), name="draft asks", on_failure="stop", failed=failed):
        yield backlog
