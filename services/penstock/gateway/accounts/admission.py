"""Bounds the number of live requests, and counts how requests ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from penstock.errors import Overloaded, PenstockError
from penstock.gateway.accounts.pot import TenantPot
from penstock.rpc.interceptors import ReaderGone
from penstock.runtime.metrics import GatewayMetrics

_OUTCOMES = {429: "limited", 503: "unavailable", 504: "timeout"}


class ClientGone(Exception):
    """The client has closed its connection."""


class Admission:
    """Counts the live and the ended requests of both doors together."""

    def __init__(self, places: TenantPot, metrics: GatewayMetrics) -> None:
        self._places = places
        self._here = 0
        """Requests that have a place, and those that have left theirs and are being cleared away."""
        self._metrics = metrics
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts how the block ends as the end of a request, whether it is admitted or not."""
        outcome = "ok"
        try:
            yield
        except BaseException as error:
            outcome = _outcome(error)
            raise
        finally:
            self._metrics.requests.labels(outcome).inc()

    @property
    def live(self) -> int:
        """Requests that have a place."""
        return self._places.used

    @contextmanager
    def one(self, tenant: str) -> Iterator[Callable[[], None]]:
        """Admits one request for the length of the block. Its place is free when what this gives is called: before the
        client can know that its request has ended, and send the next. Raises Overloaded at once when there is no
        room."""
        if self._here >= 2 * self._places.most or not self._places.take(tenant):
            what = f"the gateway is running {self.live} requests and cannot accept more of yours; try again later"
            raise Overloaded(what, code="overloaded", retry_after=1)
        self._here += 1
        self._idle.clear()
        self._metrics.live.set(self.live)
        try:
            with ExitStack() as place:
                place.callback(self._leave, tenant)
                yield place.close
        finally:
            self._here -= 1
            if not self._here:
                self._idle.set()

    async def idle(self) -> None:
        """Returns when no request runs, and nothing of one is left."""
        await self._idle.wait()

    def _leave(self, tenant: str) -> None:
        self._places.give_back(tenant)
        self._metrics.live.set(self.live)


def _outcome(error: BaseException) -> str:
    if isinstance(error, Overloaded):
        return "overloaded"
    if isinstance(error, PenstockError):
        return _OUTCOMES.get(error.http_status, "error" if error.http_status >= 500 else "refused")
    gone = (ClientGone, ReaderGone, asyncio.CancelledError, GeneratorExit)
    return "cancelled" if isinstance(error, gone) else "error"
