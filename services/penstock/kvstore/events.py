"""Who hears which blocks came and went. Bounded for every subscriber, however slow it reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

PIECE = 16_384
"""Keys in one message: about half a MiB."""
PENDING = 65_536
"""Changes that wait for one subscriber before it is sent a new snapshot instead."""


@dataclass(frozen=True, slots=True)
class Change:
    """Keys that came and went. `snapshot`: forget everything before, this is the first part of all."""

    stored: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    snapshot: bool = False


class Subscriber:
    """One reader. Made by `EventHub.subscribe`."""

    def __init__(self, keys: Callable[[], Iterable[bytes]], pending: int, piece: int) -> None:
        self._keys = keys
        self._limit = pending
        self._piece = piece
        self._pending: dict[bytes, bool] = {}
        self._restart = True
        self._snapshot: Iterator[bytes] = iter(())
        self._wake = asyncio.Event()
        self._closed = False
        self.resynchronised = 0

    def note(self, key: bytes, stored: bool) -> None:
        """A change. Of several changes of one key only the last is kept: it is all that the reader needs."""
        if self._restart:
            return  # the snapshot to come will show it
        self._pending.pop(key, None)
        self._pending[key] = stored
        if len(self._pending) > self._limit:
            self.resynchronised += 1
            self.restart()
        self._wake.set()

    def restart(self) -> None:
        """Sends a new snapshot instead of what is pending."""
        self._pending.clear()
        self._snapshot = iter(())
        self._restart = True
        self._wake.set()

    def close(self) -> None:
        """Ends the reader's loop."""
        self._closed = True
        self._wake.set()

    async def next(self) -> Change | None:
        """The next message; waits until there is one. None at the end."""
        while not self._closed:
            if self._restart:
                self._restart = False
                self._snapshot = iter(list(self._keys()))
                return Change(stored=list(islice(self._snapshot, self._piece)), snapshot=True)
            more = list(islice(self._snapshot, self._piece))
            if more:
                return Change(stored=more)
            if self._pending:
                return self._take()
            self._wake.clear()
            await self._wake.wait()
        return None

    def _take(self) -> Change:
        change = Change()
        for key in list(islice(self._pending, self._piece)):
            (change.stored if self._pending.pop(key) else change.removed).append(key)
        return change


class EventHub:
    """All subscribers of one store. `keys` gives what is stored now."""

    def __init__(self, keys: Callable[[], Iterable[bytes]], *, pending: int = PENDING, piece: int = PIECE) -> None:
        self._keys, self._pending, self._piece = keys, pending, piece
        self._subscribers: set[Subscriber] = set()
        self._resynchronised = 0
        self._closed = False

    @property
    def resynchronised(self) -> int:
        """How often a reader was too slow."""
        return self._resynchronised + sum(one.resynchronised for one in self._subscribers)

    @contextmanager
    def subscribe(self) -> Iterator[Subscriber]:
        """A subscriber for the length of the block: first a snapshot, then every change."""
        subscriber = Subscriber(self._keys, self._pending, self._piece)
        self._subscribers.add(subscriber)
        if self._closed:
            subscriber.close()
        try:
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)
            self._resynchronised += subscriber.resynchronised

    def note(self, key: bytes, stored: bool) -> None:
        """Tells everybody. Never blocks."""
        for subscriber in self._subscribers:
            subscriber.note(key, stored)

    def restart(self) -> None:
        """Everything changed: everybody gets a new snapshot."""
        for subscriber in self._subscribers:
            subscriber.restart()

    def close(self) -> None:
        """Ends all subscribers."""
        self._closed = True
        for subscriber in self._subscribers:
            subscriber.close()
