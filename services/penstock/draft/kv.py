"""The draft model's KV and the store of this host: what a text lacks is fetched, and what is full is published.

The store is an optimisation here, too: one that is away, slow or wrong costs a text the time for which it waits, which
is no longer than computing takes, and costs other texts nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING

import structlog

from penstock.draft.config import DraftConfig
from penstock.engine.hooks import Copy, Source
from penstock.engine.named import NameWatcher
from penstock.engine.speculation.leads import BlockMove, DraftBlocks, Foresight
from penstock.kv.client.client import BlockPut, Origin, StoreClient, open_store
from penstock.kv.host import host_id
from penstock.rpc.channels import open_channels
from penstock.rpc.identity import MemberIdentity
from penstock.runtime.metrics import DraftMetrics
from penstock.runtime.threads import started_threads, to_its_end
from penstock.worker.fetching import Fetcher
from penstock.worker.publishing import BlockPublisher, Soundness, open_publisher
from penstock.worker.rates import FetchRates
from penstock.worker.stored import StoredKeys

if TYPE_CHECKING:
    from penstock.engine.step.memory import PageMemory

_LEAST_S, _UNKNOWN_S = 0.05, 1.0
"""Seconds for which a text waits for its blocks, however soon they are computed, and while that is not known."""
_PAUSE_S = 5.0
"""After a wait that was too long nothing is fetched for so many seconds."""
_TRIAL_EVERY = 16
"""Of texts that should be computed sooner than fetched, one in so many is fetched, to know."""
_PUBLISH_SHARE = 4
"""At most a quarter of the pages may wait to be published."""
_INLINE_BYTES = 1 << 18
"""Copies up to this size take less time than a trip to a thread."""
_LOG = structlog.get_logger("penstock.draft")


class DraftKv:
    """Answers to what a draft model's steps say of blocks; made by `open_draft_kv`. Belongs to the event loop."""

    def __init__(
        self,
        memory: PageMemory,
        *,
        store: StoreClient,
        publisher: BlockPublisher,
        pages: KnownPages,
        metrics: DraftMetrics,
        threads: Executor,
    ) -> None:
        """`threads` copy what is fetched."""
        self._memory = memory
        self._store = store
        self._publisher = publisher
        self._pages = pages
        self._metrics = metrics
        self._threads = threads
        self._rates = FetchRates()
        self._paused_until = 0.0
        self._left_out = 0

    def moved(self, moves: Sequence[BlockMove]) -> None:
        """Blocks have come into pages, or left them."""
        self._pages.follow(moves)
        self._publisher.known.learn(key for key, move in moves if move == "stored")

    async def fetch(self, blocks: DraftBlocks) -> int:
        """Brings leading blocks into their pages, and returns how many; none where they are computed sooner."""
        count, now = len(blocks.keys), time.monotonic()
        if now < self._paused_until or not self._worth_it(count, blocks.block_s):
            return 0
        fetcher = Fetcher(
            store=self._store,
            metrics=self._metrics,
            keys=blocks.keys,
            block_size=self._memory.block_size,
            known=self._publisher.known,
            origin=_origin(blocks),
            rates=self._rates,
            cost=lambda first_token: blocks.block_s,
        )
        writer = _Writer(self._memory, blocks.pages, self._threads)
        try:
            async with asyncio.timeout(max(_LEAST_S, count * blocks.block_s) if blocks.block_s else _UNKNOWN_S):
                await fetcher.upto(count, writer, compares=True)
        except TimeoutError:
            self._metrics.store_faults.labels("fetch").inc()
            self._paused_until = time.monotonic() + _PAUSE_S
            _LOG.warning("fetch became a recompute", reason="the store took too long", blocks=count)
        return fetcher.blocks

    def offer(self, blocks: DraftBlocks, done: Callable[[], None]) -> None:
        """Publishes those blocks that the store is not known to have, and lets it hear that the others are used; calls
        `done` when nobody reads their pages any more."""
        known, origin = self._publisher.known, _origin(blocks)
        there = known.leading(blocks.keys)
        known.used(blocks.keys[:there], origin.session)
        if there == len(blocks.keys):
            done()
            return
        refs = _References(self._memory, len(blocks.keys) - there, done)
        pages = [_Reference(refs, page) for page in blocks.pages[there:]]
        size = self._memory.block_size
        puts = [
            BlockPut(
                key=blocks.keys[index],
                parent=blocks.keys[index - 1] if index else blocks.parent,
                first_token=(blocks.first + index) * size,
                data=page.view(),
                seconds=blocks.block_s,
            )
            for index, page in enumerate(pages, there)
        ]
        self._publisher.publish(puts, origin, pages, lambda stored: None, copy_context(), soundness=Soundness())

    def _worth_it(self, count: int, block_s: float) -> bool:
        """Whether so many blocks are fetched sooner than computed, as far as is known."""
        cost = self._rates.near
        if not (block_s and cost.bytes_per_s):
            return True
        if cost.overhead_s + count * self._memory.block_bytes / cost.bytes_per_s < count * block_s:
            return True
        self._left_out += 1
        return self._left_out % _TRIAL_EVERY == 0


class KnownPages:
    """KeyedPages: what the event loop knows of a pool that belongs to another thread."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        self._watchers: list[NameWatcher] = []

    def find(self, key: bytes) -> int | None:
        """Some page, if there was one when the pool was last heard of."""
        return 0 if key in self._keys else None

    def watch(self, watcher: NameWatcher) -> None:
        """From now on it hears of what `follow` does."""
        self._watchers.append(watcher)

    def follow(self, moves: Iterable[BlockMove]) -> None:
        """This has happened in the pool."""
        for key, move in moves:
            if move == "forgotten":
                self._keys.discard(key)
                for watcher in self._watchers:
                    watcher.block_forgotten(key)
            elif move == "named":
                self._keys.add(key)


class _Writer:
    """PageWriter: the pages of a text that waits for its blocks."""

    def __init__(self, memory: PageMemory, pages: Sequence[int], threads: Executor) -> None:
        self._memory = memory
        self._pages = pages
        self._threads = threads
        self.block_size = memory.block_size
        self.block_bytes = memory.block_bytes

    async def write(self, first_block: int, blocks: Sequence[Source], copy: Copy | None = None) -> int:
        """Copies blocks to pages, in a thread when they are many."""
        pages = self._pages[first_block : first_block + len(blocks)]
        if len(blocks) * self.block_bytes <= _INLINE_BYTES:
            return self._memory.write(pages, blocks, copy)
        return await to_its_end(self._threads, lambda: self._memory.write(pages, blocks, copy))

    async def take(self, first_block: int, blocks: int, within_s: float | None = None) -> int:
        """None: the model has taken what is in its pages."""
        return 0

    def settled(self, blocks: int) -> None:
        """Nobody waits for that."""


class _References:
    """So many references to pages; `done` is called when the last one is released."""

    def __init__(self, memory: PageMemory, count: int, done: Callable[[], None]) -> None:
        self.memory = memory
        self._count = count
        self._done = done

    def release(self) -> None:
        """One of them."""
        self._count -= 1
        if not self._count:
            self._done()


class _Reference:
    """PageRef: one page of a full block."""

    sound = False

    def __init__(self, all_of_them: _References, page: int) -> None:
        self._all = all_of_them
        self._released = False
        self.page = page

    def view(self) -> memoryview:
        """The page's bytes."""
        return self._all.memory.view(self.page)

    def read_into(self, destination: memoryview) -> None:
        """Copies them."""
        self._all.memory.read_into(self.page, destination)

    def release(self) -> None:
        """Once for both of two calls."""
        if not self._released:
            self._released = True
            self._all.release()


def _origin(blocks: DraftBlocks) -> Origin:
    terms = blocks.terms
    return Origin(terms.session.decode(), terms.owner, seal=terms.seal)


@asynccontextmanager
async def open_draft_kv(
    config: DraftConfig, model: Foresight, metrics: DraftMetrics, member: MemberIdentity | None = None
) -> AsyncIterator[DraftKv | None]:
    """The KV of `model` in the store that the settings name, at work for the length of the block; None without one, and
    for a draft head, whose KV stays where it is."""
    from penstock.engine.speculation.draft_model import DraftModel

    if not config.kvstore or not isinstance(model, DraftModel):
        yield None
        return
    failed, pages = metrics.task_failed, KnownPages()
    with started_threads(1, "load") as threads:
        async with (
            open_channels(member) as channels,
            open_store(
                channels.to(config.kvstore, "store"),
                f"draft-{os.getpid()}",
                model.stored_spec,
                config.host_id or host_id(),
                timeout_s=config.store_timeout_s,
                draft=True,
                failed=failed,
            ) as store,
            open_publisher(
                store,
                metrics,
                max(1, model.stats().free_pages // _PUBLISH_SHARE),
                known=StoredKeys(store, pages, metrics),
                finite=model.memory.finite,
            ) as publisher,
        ):
            yield DraftKv(model.memory, store=store, publisher=publisher, pages=pages, metrics=metrics, threads=threads)
