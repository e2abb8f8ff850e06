"""Tells subscribers which blocks came to a place and which went: to a tier of a store, or to a worker's own pages.
Memory is bounded for each subscriber, however slowly it reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

PIECE = 16_384
"""Keys in one message: about half a MiB."""
PENDING = 65_536
"""Changes that wait for one subscriber before it is sent a new snapshot instead."""


Place = TypeVar("Place")
Places = Callable[[], Iterable[tuple[bytes, Place]]]
"""All that can be found now, and where. It is read piece by piece, while blocks come and go."""


@dataclass(frozen=True, slots=True)
class Change(Generic[Place]):
    """Keys that are now in `tier`, and keys that went. `snapshot`: forget everything before, this is the first part."""

    tier: Place | None = None
    """None: there are no such keys."""
    stored: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    snapshot: bool = False


class Subscriber(Generic[Place]):
    """One reader. Made by `EventHub.subscribe`."""

    def __init__(self, keys: Places[Place], pending: int, piece: int) -> None:
        self._keys = keys
        self._limit = pending
        self._piece = piece
        self._pending: dict[bytes, Place | None] = {}
        self._restart = True
        self._snapshot: Iterator[tuple[bytes, Place]] = iter(())
        self._ahead: tuple[bytes, Place] | None = None
        """The snapshot's next."""
        self._wake = asyncio.Event()
        self._closed = False
        self._stirred = False
        self.resynchronised = 0

    def note(self, key: bytes, tier: Place | None) -> None:
        """A block is in `tier` now, or in none. Of a key's changes only the last is kept: the reader needs no more."""
        if self._restart:
            return  # the snapshot to come will show it
        self._pending.pop(key, None)
        self._pending[key] = tier
        if len(self._pending) > self._limit:
            self.resynchronised += 1
            self.restart()
        self._wake.set()

    def restart(self) -> None:
        """Sends a new snapshot instead of the pending changes."""
        self._pending.clear()
        self._snapshot, self._ahead = iter(()), None
        self._restart = True
        self._wake.set()

    def close(self) -> None:
        """Ends the reader's loop."""
        self._closed = True
        self._wake.set()

    @property
    def closed(self) -> bool:
        """Whether the end has come."""
        return self._closed

    async def next(self) -> Change[Place] | None:
        """The next message; waits until there is one. None at the end."""
        await self.news()
        return self.take()

    async def news(self) -> None:
        """Returns when there is something to take, when it is stirred, or at the end."""
        while not (self._stirred or self._closed or self._restart or self._ahead is not None or self._pending):
            self._wake.clear()
            await self._wake.wait()
        self._stirred = False

    def stir(self) -> None:
        """Has `news` return, or return at once when it is called next, whether or not there is something to take."""
        self._stirred = True
        self._wake.set()

    def take(self) -> Change[Place] | None:
        """The next message; None when there is none now, or at the end."""
        if self._closed:
            return None
        if self._restart:
            self._restart = False
            self._snapshot = iter(self._keys())
            self._ahead = next(self._snapshot, None)
            return self._part(snapshot=True)
        if self._ahead is not None:
            return self._part()
        return self._some() if self._pending else None

    def _part(self, *, snapshot: bool = False) -> Change[Place]:
        """The next keys of the snapshot that are in one tier."""
        change = Change(self._ahead[1] if self._ahead is not None else None, snapshot=snapshot)
        while self._ahead is not None and len(change.stored) < self._piece and self._ahead[1] is change.tier:
            change.stored.append(self._ahead[0])
            self._ahead = next(self._snapshot, None)
        return change

    def _some(self) -> Change[Place]:
        """The next changes, in order, up to the one that is of another tier."""
        first = next((tier for tier in self._pending.values() if tier is not None), None)
        change = Change(first)
        for key, tier in list(islice(self._pending.items(), self._piece)):
            if tier not in (None, first):
                break
            del self._pending[key]
            (change.removed if tier is None else change.stored).append(key)
        return change


class EventHub(Generic[Place]):
    """All subscribers of one store or worker. `keys` lists the blocks that can be found now."""

    def __init__(self, keys: Places[Place], *, pending: int = PENDING, piece: int = PIECE) -> None:
        self._keys, self._pending, self._piece = keys, pending, piece
        self._subscribers: dict[Subscriber[Place], None] = {}
        self._resynchronised = 0
        self._closed = False

    @property
    def resynchronised(self) -> int:
        """How often a reader was too slow."""
        return self._resynchronised + sum(one.resynchronised for one in self._subscribers)

    @contextmanager
    def subscribe(self) -> Iterator[Subscriber[Place]]:
        """A subscriber for the length of the block, which ends it: first a snapshot, then every change."""
        subscriber = Subscriber(self._keys, self._pending, self._piece)
        self._subscribers[subscriber] = None
        if self._closed:
            subscriber.close()
        try:
            yield subscriber
        finally:
            self._subscribers.pop(subscriber, None)
            subscriber.close()
            self._resynchronised += subscriber.resynchronised

    def note(self, key: bytes, tier: Place | None) -> None:
        """Tells all subscribers that a block is in `tier` now, or in none. Never blocks."""
        for subscriber in self._subscribers:
            subscriber.note(key, tier)

    def restart(self) -> None:
        """Sends every subscriber a new snapshot, because everything changed."""
        for subscriber in self._subscribers:
            subscriber.restart()

    def close(self) -> None:
        """Ends all subscribers."""
        self._closed = True
        for subscriber in self._subscribers:
            subscriber.close()
