"""Tells the router which blocks are in a worker's own pages: all of them first, then every change. One of which the far
part is there alone counts: see penstock.kv.parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from penstock.engine.pages import PagePool
from penstock.kv.events import PENDING, EventHub, Subscriber
from penstock.kv.parts import whole_key
from penstock.v1 import common_pb2
from penstock.worker.stored import in_pages

_HERE = "worker"
"""The only place that there is."""


class ResidentBlocks:
    """The named pages of a pool, for those who follow them. A NameWatcher."""

    def __init__(self, pool: PagePool, pending: int = PENDING) -> None:
        """A follower with more than `pending` changes to hear is told all blocks anew instead."""
        self._pool = pool
        self._hub: EventHub[str] = EventHub(self._places, pending=pending)
        pool.watch(self)

    def block_named(self, key: bytes) -> None:
        """A page holds the block from now on."""
        self._hub.note(whole_key(key), _HERE)

    def block_forgotten(self, key: bytes) -> None:
        """A page does not hold the block any more, or its far part."""
        key = whole_key(key)
        if not in_pages(self._pool, key):
            self._hub.note(key, None)

    @contextmanager
    def followed(self) -> Iterator[ResidentNews]:
        """What to tell one router, for the length of the block."""
        with self._hub.subscribe() as subscriber:
            yield ResidentNews(subscriber)

    def _places(self) -> Iterable[tuple[bytes, str]]:
        for key in dict.fromkeys(map(whole_key, self._pool.keys())):
            if in_pages(self._pool, key):
                yield key, _HERE


class ResidentNews:
    """The changes that one router has not been told of: BlockNews of its stream."""

    def __init__(self, subscriber: Subscriber[str]) -> None:
        self._subscriber = subscriber

    async def wait(self) -> None:
        """Returns when there is something to tell."""
        await self._subscriber.news()

    def take(self) -> common_pb2.BlockEvents | None:
        """The next message; None when there is none now."""
        change = self._subscriber.take()
        if change is None:
            return None
        return common_pb2.BlockEvents(stored=change.stored, removed=change.removed, snapshot=change.snapshot)
