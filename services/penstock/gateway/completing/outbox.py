"""Deltas on their way from the choices of a request to its one reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.errors import PenstockError
from penstock.gateway.completing.delta import Delta


def _nobody() -> None:
    pass


class Outbox:
    """Hands deltas over.

    Each that comes while the reader waits stays one of its own, also when many come at once. While the reader is busy,
    because its client reads more slowly than the model generates, those of a choice are merged into one. With `apart`
    they are not: then what is handed over depends on the answer alone.
    """

    def __init__(self, choices: int, ended: Callable[[], None] = _nobody, *, apart: bool = False) -> None:
        """`ended` is called when the reader hears that every choice has ended: before it can tell its client."""
        self._ended: Callable[[], None] = ended
        self._apart = apart
        self._ready: list[Delta] = []
        """What came since the reader began to wait, or since it took the last ones."""
        self._merged: dict[int, Delta] = {}
        """What came while it was busy, by choice; empty when it waits."""
        self._open = choices
        self.error: PenstockError | None = None
        """What ended the request; None: nothing did."""
        self._reader: asyncio.Future[None] | None = None
        """Done when there is something for `next`; None while nobody waits there."""
        self._whole: asyncio.Future[None] | None = None
        """The same for `whole`."""

    @property
    def ended(self) -> bool:
        """Whether every choice has ended, and the reader has all that they gave."""
        return self._open == 0 and not self._ready and not self._merged

    def put(self, delta: Delta) -> None:
        """Adds a delta to those that the reader has not taken; an empty one is ignored."""
        if not delta:
            return
        if self._reader is not None or self._apart:
            self._ready.append(delta)
            self._wake(self._reader)
        elif (earlier := self._merged.get(delta.choice)) is not None:
            earlier.merge(delta)
        else:
            self._merged[delta.choice] = delta
        if delta.finish:
            self._open -= 1
            if self._open == 0:
                self._wake(self._whole)

    def fail(self, error: PenstockError) -> None:
        """Ends the request; the first error counts."""
        self.error = self.error or error
        self.nudge()
        self._wake(self._whole)

    def close(self) -> None:
        """Calls nobody any more."""
        self._ended = _nobody

    def nudge(self) -> None:
        """Lets a reader that waits in `next` go, even though there is nothing for it."""
        self._wake(self._reader)

    async def next(self) -> list[Delta]:
        """Waits for deltas and returns them; an empty list when every choice has ended, see `ended`, and after `nudge`.
        Raises the error of `fail` when the deltas before it were taken."""
        if not self._ready and not self._merged:
            if self.error is None and self._open:
                self._reader = asyncio.get_running_loop().create_future()
                try:
                    await self._reader
                finally:
                    self._reader = None
            if self.error is not None and not self._ready:
                raise self.error
        taken, self._ready = self._ready, []
        if self._merged:
            taken, self._merged = list(self._merged.values()), {}
        if self._open == 0 and not taken:
            self._ended()
        return taken

    async def whole(self) -> list[Delta]:
        """Waits for the end and returns one delta for each choice, in their order. Raises the error of `fail`."""
        if self.error is None and self._open:
            self._whole = asyncio.get_running_loop().create_future()
            await self._whole
        if self.error is not None:
            raise self.error
        found = [self._merged[choice] for choice in sorted(self._merged)]
        self._ended()
        return found

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
