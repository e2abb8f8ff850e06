"""The first question of every request: is there room for one more?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Gauge

from penstock.rpc.errors import Overloaded


class Admission:
    """Counts live requests, of both doors together."""

    def __init__(self, most: int, gauge: Gauge) -> None:
        self.live = 0
        self._most = most
        self._gauge = gauge
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Admits one request for the length of the block. Raises Overloaded at once when there is no room."""
        if self.live >= self._most:
            raise Overloaded(
                f"{self._most} requests are running, more are not possible; try again later",
                code="rate_limit_exceeded",
                retry_after=1,
            )
        self.live += 1
        self._idle.clear()
        self._gauge.set(self.live)
        try:
            yield
        finally:
            self.live -= 1
            self._gauge.set(self.live)
            if self.live == 0:
                self._idle.set()

    async def idle(self) -> None:
        """Returns when no request runs."""
        await self._idle.wait()
