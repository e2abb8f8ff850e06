"""How the doors close: what runs may finish for a while, then gets an error instead of a cut connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from penstock.errors import Unavailable
from penstock.gateway.completing.models import Models

_LAST_WORDS_S = 1.0
"""Seconds after the grace for errors to reach clients; who does not read them is cut off."""


def stopping() -> Unavailable:
    """The error for requests that come too late, or take too long."""
    return Unavailable("the gateway is stopping; try again", code="stopping", retry_after=1)


class Drain:
    """Knows what both doors are serving, and ends it."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._running: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.closing = False
        """Nothing new is taken."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """For the length of one request. Raises Unavailable when the gateway stops, at its begin or at its end."""
        if self.closing:
            raise stopping()
        try:
            async with asyncio.timeout(None) as limit:
                self._add(limit)
                try:
                    yield
                finally:
                    self._remove(limit)
        except TimeoutError:
            if limit.expired():
                raise stopping() from None
            raise

    async def close(self, grace_s: float) -> None:
        """Refuses what comes, lets what runs finish for `grace_s` seconds, then ends it with an error."""
        self.closing = True
        if self._running:
            log = structlog.get_logger("penstock.gateway")
            log.warning("stopping when the running requests have ended", requests=len(self._running), within_s=grace_s)
        if await self._ended(grace_s):
            return
        self._models.give_up(stopping())
        if await self._ended(_LAST_WORDS_S):
            return
        now = asyncio.get_running_loop().time()
        for limit in self._running:  # bodies that still arrive, prompts in the making, clients that do not read
            if not limit.expired():
                limit.reschedule(now)
        await self._ended(_LAST_WORDS_S)

    async def _ended(self, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _add(self, limit: asyncio.Timeout) -> None:
        self._running.add(limit)
        self._idle.clear()

    def _remove(self, limit: asyncio.Timeout) -> None:
        self._running.discard(limit)
        if not self._running:
            self._idle.set()
