"""Which blocks of a worker's own pages its store has, and that they are used, which the store can't see.

A store keeps what is used. A sequence that takes its blocks from pages asks for none, so the store is told, several
times a second at most. What the worker believes of the store is a hint: the store's answer says which blocks it does
not have, and those are published when they are used the next time. Who hands blocks on through the store asks first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Protocol

import structlog

from penstock.engine.named import NameWatcher
from penstock.kv.client.client import StoreClient, StoreFault
from penstock.kv.identity import MAX_BATCH
from penstock.kv.parts import far_key, whole_key
from penstock.runtime.metrics import StoringMetrics

_PAUSE_S = 0.2
_MOST_WAITING = 65_536
"""Uses that the store was not told of yet; more are forgotten."""
_LOG = structlog.get_logger("penstock.worker")

Uses = list[tuple[str, Sequence[bytes]]]


class KeyedPages(Protocol):
    """Pages by what they hold: a PagePool, or who follows one."""

    def find(self, key: bytes) -> int | None:
        """The page that holds the block, or its far part if that is asked for; None when no page does."""
        ...

    def watch(self, watcher: NameWatcher) -> None:
        """Tells the watcher of every block that gets a page or loses it, from now on."""
        ...


def in_pages(pool: KeyedPages, key: bytes) -> bool:
    """Whether a page has the block, or its far part: see penstock.kv.parts."""
    return pool.find(key) is not None or pool.find(far_key(key)) is not None


class StoredKeys:
    """The named pages whose blocks the store is believed to have. A NameWatcher; `run` tells the store of uses."""

    def __init__(self, store: StoreClient, pool: KeyedPages, metrics: StoringMetrics) -> None:
        self._store = store
        self._pool = pool
        self._metrics = metrics
        self._keys: set[bytes] = set()
        self._attachment = ""
        self._uses: dict[str, dict[bytes, None]] = {}
        self._waiting = 0
        self._wake = asyncio.Event()
        pool.watch(self)

    def learn(self, keys: Iterable[bytes]) -> None:
        """The store has these blocks: it took or gave them. Those that are not in pages are not remembered."""
        self._look()
        self._keys.update(key for key in keys if in_pages(self._pool, key))

    def leading(self, keys: Iterable[bytes]) -> int:
        """How many of the leading blocks the store has."""
        self._look()
        return sum(1 for _ in takewhile(self._keys.__contains__, keys))

    def used(self, keys: Sequence[bytes], session: str) -> None:
        """A sequence uses these blocks, from pages."""
        if not keys or self._waiting + len(keys) > _MOST_WAITING:
            return
        mine = self._uses.setdefault(session, {})
        self._waiting -= len(mine)
        mine.update(dict.fromkeys(keys))
        self._waiting += len(mine)
        self._wake.set()

    async def confirm(self, keys: Sequence[bytes], session: str) -> None:
        """As `used`, and returns when the store has said which of them it does not have."""
        if keys:
            await self._tell_all({session: dict.fromkeys(keys)})

    def block_named(self, key: bytes) -> None:
        """The store may have it or not."""

    def block_forgotten(self, key: bytes) -> None:
        """The block, or its far part, is not in pages any more."""
        key = whole_key(key)
        if not in_pages(self._pool, key):
            self._keys.discard(key)

    async def run(self) -> None:
        """Tells the store of uses until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            uses, self._uses, self._waiting = self._uses, {}, 0
            await self._tell_all(uses)
            await asyncio.sleep(_PAUSE_S)

    async def _tell_all(self, uses: dict[str, dict[bytes, None]]) -> None:
        try:
            for batch in _batches(uses):
                absent = await self._store.touch(batch)
                self._keys.difference_update(absent)
                self._metrics.touched.inc(sum(len(keys) for _, keys in batch) - len(absent))
        except StoreFault as fault:
            self._metrics.store_faults.labels("touch").inc()
            _LOG.warning("the store does not hear of uses", reason=str(fault))

    def _look(self) -> None:
        """Forgets everything when the store is another one, or has begun anew."""
        if self._store.attachment != self._attachment:
            self._attachment = self._store.attachment
            self._keys.clear()


def _batches(uses: dict[str, dict[bytes, None]]) -> Iterator[Uses]:
    """All uses, in messages of at most MAX_BATCH keys."""
    batch: Uses = []
    room = MAX_BATCH
    for session, found in uses.items():
        keys = list(found)
        while keys:
            batch.append((session, keys[:room]))
            keys, room = keys[room:], room - len(batch[-1][1])
            if not room:
                yield batch
                batch, room = [], MAX_BATCH
    if batch:
        yield batch
