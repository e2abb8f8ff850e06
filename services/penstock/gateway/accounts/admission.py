"""Bounds the number of live requests, and counts how requests ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import Overloaded, PenstockError
from penstock.runtime.metrics import GatewayMetrics

_OUTCOMES = {429: "limited", 503: "unavailable", 504: "timeout"}


class ClientGone(Exception):
    """The client has closed its connection."""


class Admission:
    """Counts the live and the ended requests of both doors together."""

    def __init__(self, most: int, metrics: GatewayMetrics) -> None:
        self.live = 0
        self._most = most
        self._metrics = metrics
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Admits one request for the length of the block. Raises Overloaded at once when there is no room."""
        outcome = "ok"
        try:
            with self._place():
                yield
        except BaseException as error:
            outcome = _outcome(error)
            raise
        finally:
            self._metrics.requests.labels(outcome).inc()

    async def idle(self) -> None:
        """Returns when no request runs."""
        await self._idle.wait()

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self.live >= self._most:
            what = f"the gateway is running {self._most} requests and cannot accept more; try again later"
            raise Overloaded(what, code="overloaded", retry_after=1)
        self._set(self.live + 1)
        try:
            yield
        finally:
            self._set(self.live - 1)

    def _set(self, live: int) -> None:
        self.live = live
        self._metrics.live.set(live)
        if live:
            self._idle.clear()
        else:
            self._idle.set()


def _outcome(error: BaseException) -> str:
    if isinstance(error, Overloaded):
        return "overloaded"
    if isinstance(error, PenstockError):
        return _OUTCOMES.get(error.http_status, "error" if error.http_status >= 500 else "refused")
    gone = (ClientGone, asyncio.CancelledError, GeneratorExit)
    return "cancelled" if isinstance(error, gone) else "error"
