"""How many lines are on their way at one time: as many as workers have taken, and a few more that ask for workers.

Nobody sets a number. The router holds a line back as long as no worker of its model has a place for one
(docs/design/batches.md), and as long as some are held back no more of that model are sent: so the window is as wide as
the mesh has room, and follows it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from itertools import count

_ASKING = 2
"""Lines of a model that ask for workers at one time: one would leave a worker without while its plan is made."""


class LineWindow:
    """The lines of all batches that a gateway runs. Who waits comes in turn, so batches share it evenly."""

    def __init__(self, most: int) -> None:
        """At most `most` lines are on their way, whatever room there is: each takes memory here."""
        self._most = most
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[LinePlace]]]] = {}
        """By model, each with its number in the order of coming."""
        self._numbers = count()
        self.lines = 0
        """On their way."""
        self.asking: Counter[str] = Counter()
        """Those of them that no worker has taken yet, by model."""

    async def enter(self, model: str) -> LinePlace:
        """Waits for a place for a line of a model; the caller owes one `leave`."""
        if model not in self._waiting and self._open(model):
            return self._take(model)
        turn: asyncio.Future[LinePlace] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(model, deque()).append((next(self._numbers), turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had its place already
                turn.result().leave()
            self.let_in()
            raise

    def let_in(self) -> None:
        """Gives places to those who wait, as far as there are any."""
        while (model := self._next()) is not None:
            _, turn = self._waiting[model].popleft()
            turn.set_result(self._take(model))

    def _next(self) -> str | None:
        """The model of whoever has waited longest of those for whom there is a place."""
        for model, line in list(self._waiting.items()):
            while line and line[0][1].done():
                line.popleft()
            if not line:
                del self._waiting[model]
        able = [(line[0][0], model) for model, line in self._waiting.items() if self._open(model)]
        return min(able)[1] if able else None

    def _open(self, model: str) -> bool:
        return self.asking[model] < _ASKING and self.lines < self._most

    def _take(self, model: str) -> LinePlace:
        self.lines += 1
        self.asking[model] += 1
        return LinePlace(self, model)


class LinePlace:
    """The place of one line."""

    def __init__(self, window: LineWindow, model: str) -> None:
        self._window = window
        self._model = model
        self._asks = self._held = True

    def taken(self) -> None:
        """Workers have taken the line; a second call does nothing."""
        if self._asks:
            self._asks = False
            self._window.asking[self._model] -= 1
            self._window.let_in()

    def leave(self) -> None:
        """The line is not on its way any more; a second call does nothing."""
        if self._held:
            self._held = False
            self._window.lines -= 1
            self.taken()
            self._window.let_in()
