"""How many lines are on their way at one time: as many as workers have taken, and a few more that ask for workers.

Nobody sets a number. The router holds a line back as long as no worker of its model has a place for one
(docs/design/batches.md), and as long as some are held back no more of that model are sent: so the window is as wide as
the mesh has room, and follows it.

Lines of one length that begin together end together, and those in their places begin together again, for as long as the
batch lasts: each time gateway, router and store have a burst of work, behind which live requests wait. So lines begin
one by one, nearly as far from each other as they end when they are spread evenly.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict, deque
from itertools import count

_ASKING = 2
"""Lines of a model that ask for workers at one time: one would leave a worker without while its plan is made."""
SPREAD = 0.8
"""A line begins when so much of the mean distance between two ends has passed since the one before began, or sooner."""
_MOST_S = 0.02
"""Between two that begin, where a few lines are on their way for long: others have their turn meanwhile."""
_LEARN = 0.1


class _Pace:
    """How far apart lines of one model begin."""

    def __init__(self, spread: float) -> None:
        self._spread = spread
        self._stay_s = 0.0
        """The mean time that a line is on its way; 0: none has ended."""
        self.lines = 0
        """On their way."""
        self.next_at = -math.inf
        """When the next one may begin."""

    def began(self, now: float) -> None:
        """A line has."""
        self.lines += 1
        self.next_at = now + self._spread * min(_MOST_S, self._stay_s / self.lines if self._stay_s else _MOST_S)

    def ended(self, stay_s: float) -> None:
        """A line that was on its way for so long has left."""
        self.lines -= 1
        self._stay_s += (_LEARN if self._stay_s else 1.0) * (stay_s - self._stay_s)


class LineWindow:
    """The lines of all batches that a gateway runs. Who waits comes in turn, so batches share it evenly."""

    def __init__(self, most: int, *, spread: float = SPREAD) -> None:
        """At most `most` lines are on their way, whatever room there is: each takes memory here. `spread` 0: lines
        begin as soon as there is room."""
        self._most = most
        self._paces: defaultdict[str, _Pace] = defaultdict(lambda: _Pace(spread))
        """By model."""
        self._timer: asyncio.TimerHandle | None = None
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
        self._look_again()
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
        self._look_again()
        return min(able)[1] if able else None

    def _open(self, model: str) -> bool:
        return self._room(model) and self._paces[model].next_at <= _now()

    def _room(self, model: str) -> bool:
        return self.asking[model] < _ASKING and self.lines < self._most

    def _look_again(self) -> None:
        """Lets in those for whom there is room as soon as it is their turn, be it now."""
        if self._timer is not None:
            self._timer.cancel()
        times = [self._paces[model].next_at for model in self._waiting if self._room(model)]
        self._timer = asyncio.get_running_loop().call_at(min(times), self.let_in) if times else None

    def _take(self, model: str) -> LinePlace:
        self.lines += 1
        self.asking[model] += 1
        self._paces[model].began(_now())
        return LinePlace(self, model)

    def left(self, model: str, stay_s: float) -> None:
        """A line of the model, which was on its way for so long, is not any more."""
        self.lines -= 1
        self._paces[model].ended(stay_s)


def _now() -> float:
    return asyncio.get_running_loop().time()


class LinePlace:
    """The place of one line."""

    def __init__(self, window: LineWindow, model: str) -> None:
        self._window = window
        self._model = model
        self._asks = self._held = True
        self._since = _now()

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
            self._window.left(self._model, _now() - self._since)
            self.taken()
            self._window.let_in()
