"""Has leases and reservations taken back when their time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.kvstore.table.table import BlockTable

_SHORTEST_S = 0.001


class Alarm:
    """Calls `expire` of a table when something in it ends. `ring_at` is the table's `wake`; `cancel` at the end.

    Made in the loop that it rings in."""

    def __init__(self, now: Callable[[], float], table: Callable[[], BlockTable]) -> None:
        """`table` is asked for each time: another one may have taken its place."""
        self._loop = asyncio.get_running_loop()
        self._now = now
        self._table = table
        self._timer: asyncio.TimerHandle | None = None
        self._armed = 0.0
        self._over = False

    def ring_at(self, end: float) -> None:
        """Something ends then."""
        if self._over or (self._timer is not None and self._armed <= end):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed = end
        pause = max(_SHORTEST_S, end - self._now())
        self._timer = self._loop.call_later(pause, self._ring)

    def _ring(self) -> None:
        self._timer = None
        table = self._table()
        table.expire(self._now())
        if (end := table.next_end()) is not None:
            self.ring_at(end)

    def cancel(self) -> None:
        """Stops it for good."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
