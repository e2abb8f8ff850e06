"""One line on its way to an answer, however often that has to be tried."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import structlog

from penstock.errors import Internal, PenstockError
from penstock.gateway.batches.lines import BatchLine, LineResult, answered
from penstock.gateway.batches.records import Clock, Json, StoredBatch
from penstock.gateway.batches.window import LinePlace, LineWindow

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""Between two tries of a line for which the mesh has no room or no workers, or its tenant no money."""
_MOST_DEFECTS = 3
"""Times that a line may meet a fault of ours; then that is its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineAsk:
    """One line, for those who answer it."""

    tenant: str
    endpoint: str
    id: str
    body: bytes
    patience_s: float
    """An answer is of no use later."""
    taken: Callable[[], None]
    """To be called when workers have taken it."""


class LineAnswers(Protocol):
    """The way of a request, for lines; see `LineDoor`."""

    def served(self, model: str) -> str | None:
        """Why no request for a model of that name can be served; None: it can."""

    async def answer(self, ask: LineAsk) -> Json:
        """The body of the answer. Raises PenstockError."""

    def error(self, ask: LineAsk, error: PenstockError) -> Json:
        """The body of an error."""


class LineAnswerer:
    """Answers the lines of one batch."""

    def __init__(self, batch: StoredBatch, answers: LineAnswers, window: LineWindow, clock: Clock) -> None:
        self._batch = batch
        self._answers = answers
        self._window = window
        self._clock = clock
        self._pausing = 0
        self._awake = asyncio.Event()
        self._awake.set()

    async def place(self, line: BatchLine) -> LinePlace:
        """A place for a line; the caller owes one `leave`, or gives it to `answer`. As long as lines of the batch
        pause, there is none: others would only meet what they have met."""
        await self._awake.wait()
        return await self._window.enter(line.model)

    async def answer(self, line: BatchLine, place: LinePlace) -> LineResult:
        """What becomes of a line. It leaves its place, and takes another after a pause, when it has to be tried again;
        however this ends, it has left."""
        pause_s, defects, batch = _FIRST_PAUSE_S, 0, self._batch
        try:
            while True:
                ask = LineAsk(
                    tenant=batch.tenant,
                    endpoint=batch.endpoint,
                    id=line.id(batch),
                    body=line.body,
                    patience_s=max(0.0, batch.expires_at - self._clock()),
                    taken=place.taken,
                )
                try:
                    return answered(batch, line, 200, await self._answers.answer(ask))
                except PenstockError as caught:
                    error = caught
                except Exception:
                    structlog.get_logger("penstock.gateway").exception("a line of a batch failed", line=ask.id)
                    error = Internal("internal error")
                defects += isinstance(error, Internal)
                if (error.http_status < 500 and error.http_status != 429) or defects >= _MOST_DEFECTS:
                    return answered(batch, line, error.http_status, self._answers.error(ask, error))
                place.leave()
                with self._pause():
                    await asyncio.sleep(
                        max(pause_s, min(error.retry_after or 0, _LONGEST_PAUSE_S)) * random.uniform(0.7, 1)
                    )
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                place = await self._window.enter(line.model)
        finally:
            place.leave()

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._pausing += 1
        self._awake.clear()
        try:
            yield
        finally:
            self._pausing -= 1
            if not self._pausing:
                self._awake.set()
