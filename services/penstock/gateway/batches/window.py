"""How many lines are on their way at one time: as many as workers have taken, and a few more that ask for workers.

Nobody sets a number. The router holds a line back as long as no worker has a place for one (docs/design/batches.md),
and as long as some are held back no more are sent: so the window is as wide as the mesh has room, and follows it.
"""

from __future__ import annotations

import asyncio
from collections import deque

_ASKING = 2
"""Lines that ask for workers at one time: one would leave a worker without while its plan is made."""


class LineWindow:
    """The lines of all batches that a gateway runs. Who waits comes in turn, so batches share it evenly."""

    def __init__(self, most: int) -> None:
        """At most `most` lines are on their way, whatever room there is: each takes memory here."""
        self._most = most
        self._waiting: deque[asyncio.Future[LinePlace]] = deque()
        self.lines = 0
        """On their way."""
        self.asking = 0
        """Those of them that no worker has taken yet."""

    async def enter(self) -> LinePlace:
        """Waits for a place; the caller owes one `leave`."""
        if not self._waiting and self._open:
            return self._take()
        turn: asyncio.Future[LinePlace] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had its place already
                turn.result().leave()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def let_in(self) -> None:
        """Gives places to those who wait, as far as there are any."""
        while self._waiting and self._open:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(self._take())

    @property
    def _open(self) -> bool:
        return self.asking < _ASKING and self.lines < self._most

    def _take(self) -> LinePlace:
        self.lines += 1
        self.asking += 1
        return LinePlace(self)


class LinePlace:
    """The place of one line."""

    def __init__(self, window: LineWindow) -> None:
        self._window = window
        self._asks = self._held = True

    def taken(self) -> None:
        """Workers have taken the line; a second call does nothing."""
        if self._asks:
            self._asks = False
            self._window.asking -= 1
            self._window.let_in()

    def leave(self) -> None:
        """The line is not on its way any more; a second call does nothing."""
        if self._held:
            self._held = False
            self._window.lines -= 1
            self.taken()
            self._window.let_in()
