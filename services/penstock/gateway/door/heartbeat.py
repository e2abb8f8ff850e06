"""A timer for silences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Heartbeat:
    """Beats when nothing was heard for a while. Its timer is moved when it is due, not with every sound."""

    def __init__(self, every_s: float, beat: Callable[[], None]) -> None:
        self.due = False
        """It has beaten, and nothing was heard since."""
        self._every_s = every_s
        self._beat = beat
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = self._loop.call_later(every_s, self._due)

    def heard(self) -> None:
        """Begins the silence anew."""
        self.due = False
        self._last = self._loop.time()

    def every(self, seconds: float) -> None:
        """Begins the silence anew, and beats after so many seconds of it from now on."""
        self._every_s = seconds
        self.heard()
        self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._due)

    def close(self) -> None:
        """Stops."""
        self._timer.cancel()

    def _due(self) -> None:
        left = self._last + self._every_s - self._loop.time()
        if left <= 0:
            self.due = True
            self._beat()
            self._last, left = self._loop.time(), self._every_s
        self._timer = self._loop.call_later(left, self._due)


@contextmanager
def heartbeat(every_s: float, beat: Callable[[], None]) -> Iterator[Heartbeat]:
    """For the length of the block `beat` is called after each `every_s` seconds in which nothing was heard."""
    found = Heartbeat(every_s, beat)
    try:
        yield found
    finally:
        found.close()
