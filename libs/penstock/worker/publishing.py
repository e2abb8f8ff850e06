"""Full pages of the engine into the KV store.

A store that is away, slow or wrong costs cached blocks, never a request: every failure here is counted and logged,
and the pages are released. KV that is not finite stays here: it would fail every later request with the same prompt.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import Context, copy_context
from dataclasses import dataclass
from itertools import takewhile

import structlog

from penstock.engine.hooks import PageRef
from penstock.kv.client.client import NOBODY, BlockPut, Origin, StoreClient, StoreFault
from penstock.kv.identity import Chain
from penstock.runtime.metrics import StoringMetrics
from penstock.runtime.tasks import Failed, being_cancelled, beside, within
from penstock.runtime.threads import started_threads, to_its_end
from penstock.worker.lending import PageLending
from penstock.worker.stored import StoredKeys

_LOG = structlog.get_logger("penstock.worker")
_TOGETHER = 256
"""Blocks that are stored at a time, unless one sequence has filled more at once."""


@dataclass
class Soundness:
    """Whether the KV of one request may be published. Once it may not, nothing more of the request is."""

    sound: bool = True


@dataclass(slots=True)
class _Batch:
    blocks: list[BlockPut]
    origin: Origin
    pages: Sequence[PageRef]
    done: Callable[[int], None]
    context: Context
    soundness: Soundness
    over: bool = False
    """Its pages are released."""


class BlockPublisher:
    """Stores filled pages, in order, from one queue; made by `open_publisher`.

    Pages stay referenced until their bytes are in the store. A queue that holds `max_pages` drops further pages instead
    of holding memory that sequences need; a page that several requests publish counts once.
    """

    def __init__(
        self,
        store: StoreClient,
        metrics: StoringMetrics,
        max_pages: int,
        *,
        known: StoredKeys,
        finite: Callable[[memoryview], bool],
        thread: Executor,
        lending: PageLending | None = None,
    ) -> None:
        """`known` learns what the store has; `finite` says whether a block's bytes are finite numbers, `thread` calls
        it. `lending` lends what need not be copied; None: everything is."""
        self.known = known
        self.lending = lending
        self.lends = True
        """Whether it uses that."""
        self._store = store
        self._metrics = metrics
        self._max_pages = max_pages
        self._finite = finite
        self._thread = thread
        self._queued: Counter[int] = Counter()
        """References in the queue, by page."""
        self._batches: deque[_Batch] = deque()
        self._wake = asyncio.Event()

    def publish(
        self,
        blocks: list[BlockPut],
        origin: Origin,
        pages: Sequence[PageRef],
        done: Callable[[int], None],
        context: Context,
        *,
        soundness: Soundness,
    ) -> None:
        """Queues pages; `done` is called with the number of leading blocks that the store has afterwards.

        `context` is the request's: its id and trace go with the store's calls. `soundness` is the request's as well:
        this changes it when the KV turns out not to be finite, and looks at it when it is the pages' turn.
        """
        fit = self._fitting(pages) if self._store.connected else 0
        if fit < len(pages):
            self._metrics.store_faults.labels("publish").inc()
            _release(pages[fit:])
        if not fit:
            done(0)
            return
        self._queued.update(page.page for page in pages[:fit])
        self._batches.append(_Batch(blocks[:fit], origin, tuple(pages[:fit]), done, context, soundness))
        self._wake.set()

    def _fitting(self, pages: Sequence[PageRef]) -> int:
        """How many of the leading pages there is room for."""
        new: set[int] = set()
        for at, page in enumerate(pages):
            if page.page not in self._queued:
                new.add(page.page)
                if len(self._queued) + len(new) > self._max_pages:
                    return at
        return len(pages)

    async def run(self) -> None:
        """Stores queued blocks until it is cancelled. When it raises, only the blocks that it was storing are lost."""
        while True:
            while self._batches:
                await self._store_all(self._next())
            self._wake.clear()
            await self._wake.wait()

    def close(self) -> None:
        """Releases every page that is still queued."""
        while self._batches:
            _release(self._batches.popleft().pages)

    def _next(self) -> dict[Origin, list[_Batch]]:
        """The oldest batches, by origin."""
        taken: dict[Origin, list[_Batch]] = {}
        room = _TOGETHER
        while self._batches and (not taken or len(self._batches[0].blocks) <= room):
            batch = self._batches.popleft()
            room -= len(batch.blocks)
            taken.setdefault(batch.origin, []).append(batch)
        return taken

    async def _store_all(self, taken: dict[Origin, list[_Batch]]) -> None:
        """Stores the blocks of each origin in one call, beside those of other origins. One block for each call, a
        loaded worker would fall behind, and would take the blocks that wait along when it dies."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for batches in taken.values():
                    tasks.create_task(self._store_some(batches))
        finally:
            self._end(itertools.chain.from_iterable(taken.values()), 0)  # those whose task never began

    async def _store_some(self, batches: Sequence[_Batch]) -> None:
        """Stores batches of one origin. The call is made in the context of the first one's request."""
        first = batches[0]
        try:
            sound = await self._sound(batches)
            blocks = [block for batch, count in zip(batches, sound, strict=True) for block in batch.blocks[:count]]
            if blocks:
                pages = [page for batch, count in zip(batches, sound, strict=True) for page in batch.pages[:count]]
                await within(first.context, self._give(blocks, pages, first.origin))
                self.known.learn(block.key for block in blocks)
            for batch, count in zip(batches, sound, strict=True):
                self._end([batch], count)
        except (StoreFault, asyncio.CancelledError) as fault:
            if isinstance(fault, asyncio.CancelledError) and being_cancelled():
                raise
            self._metrics.store_faults.labels("publish").inc(len(batches))
            lost = sum(len(batch.blocks) for batch in batches)
            _LOG.warning("blocks were not published", blocks=lost, reason=str(fault))
        finally:
            self._end(batches, 0)

    def _end(self, batches: Iterable[_Batch], stored: int) -> None:
        """Ends each batch that has not ended: releases its pages, and tells how many of its leading blocks are
        stored."""
        for batch in batches:
            if not batch.over:
                batch.over = True
                self._queued -= Counter(page.page for page in batch.pages)
                _release(batch.pages)
                batch.done(stored)

    async def _give(self, blocks: list[BlockPut], pages: Sequence[PageRef], origin: Origin) -> None:
        if self.lending is not None and self.lends:
            blocks = await self.lending.lend(blocks, pages, origin)
        if blocks:
            self._metrics.published.inc(await self._store.put(blocks, origin))

    async def _sound(self, batches: Sequence[_Batch]) -> list[int]:
        """How many leading blocks of each may be stored: none from the first bad one of a request on."""
        counts = await to_its_end(self._thread, lambda: [self._count_finite(batch) for batch in batches])
        for place, batch in enumerate(batches):
            request, bad = batch.soundness, len(batch.blocks) - counts[place]
            if not request.sound:  # or it has failed meanwhile
                counts[place] = 0
            elif bad:
                request.sound = False
                self._metrics.store_faults.labels("not_finite").inc()
                _LOG.error("blocks are not published: their KV is not finite", blocks=bad)
        return counts

    def _count_finite(self, batch: _Batch) -> int:
        found = (
            batch.soundness.sound and (page.sound or self._finite(memoryview(block.data)))
            for block, page in zip(batch.blocks, batch.pages, strict=True)
        )
        return sum(takewhile(bool, found))


@asynccontextmanager
async def open_publisher(
    store: StoreClient,
    metrics: StoringMetrics,
    max_pages: int,
    *,
    known: StoredKeys,
    finite: Callable[[memoryview], bool],
    lending: PageLending | None = None,
) -> AsyncIterator[BlockPublisher]:
    """A publisher that works for the length of the block, as do `known` and `lending`; `finite` is called in a
    thread."""
    failed = metrics.task_failed
    with started_threads(1, "publish") as thread:
        publisher = BlockPublisher(
            store, metrics, max_pages, known=known, finite=finite, thread=thread, lending=lending
        )
        try:
            async with (
                _beside_lending(lending, failed),
                beside(publisher.run, name="publish", on_failure="restart", failed=failed),
                beside(known.run, name="touch", on_failure="restart", failed=failed),
            ):
                yield publisher
        finally:
            publisher.close()


def _beside_lending(lending: PageLending | None, failed: Failed) -> AbstractAsyncContextManager[object]:
    return nullcontext() if lending is None else beside(lending.run, name="lend", on_failure="restart", failed=failed)


class BlockSink:
    """KvSink: publishes each full block of one sequence, and keeps count for the hand-off.

    A block of which this worker has the far part alone counts, although the store may have lost it since: who takes the
    KV over asks the store for it, which is the only way to have it."""

    def __init__(
        self,
        publisher: BlockPublisher,
        chain: Chain,
        *,
        origin: Origin = NOBODY,
        cost: Callable[[int], float] = lambda _first_token: 0.0,
        gave_up: Callable[[], None] = lambda: None,
    ) -> None:
        """`chain` names the sequence's blocks; `cost` gives a block's seconds by its first token. `gave_up` is called
        when blocks are not stored, or not soon."""
        self._publisher = publisher
        self._origin = origin
        self._cost = cost
        self._gave_up = gave_up
        self._chain = chain
        self._context = copy_context()
        self._pending = 0
        self._soundness = Soundness()
        self.stored: int | None = None
        """Leading blocks that are stored, or were; None until the first report. A gap ends the count."""
        self._passed: deque[tuple[int, int]] = deque()
        """(Begin, end) of runs that `passed` has told of, before which others still have to be stored."""
        self.changed = asyncio.Event()
        self.tail: bytes = b""
        self.valid_tokens: int | None = None
        """Leading tokens with KV; None until the sequence has ended normally."""

    @property
    def keys(self) -> Sequence[bytes]:
        """The keys of all full blocks so far, at least those of the prompt."""
        return self._chain.keys

    def loaded(self, blocks: int) -> None:
        """Notes that the store has the first `blocks` blocks."""
        self.stored = max(self.stored or 0, blocks)
        while self._passed and self._passed[0][0] <= self.stored:
            self.stored = max(self.stored, self._passed.popleft()[1])
        self.changed.set()

    def filled(self, first_block: int, pages: Sequence[PageRef], tokens: Sequence[int]) -> None:
        """Queues the blocks that the store lacks; their pages are released when it has them or is given up."""
        chain, size = self._chain, self._chain.block_size
        chain.cover(tokens)
        there = self._stored_already(first_block, len(pages))
        if there:
            _release(pages[:there])
            first_block, pages = first_block + there, pages[there:]
        if not pages:
            return
        blocks = [
            BlockPut(
                key=chain.keys[index],
                parent=chain.parent(index),
                first_token=index * size,
                data=page.view(),
                seconds=self._cost(index * size),
            )
            for index, page in enumerate(pages, first_block)
        ]
        self._pending += 1
        self._publisher.publish(
            blocks,
            self._origin,
            pages,
            lambda stored: self._published(first_block, len(blocks), stored),
            self._context,
            soundness=self._soundness,
        )

    def passed(self, first_block: int, blocks: int, tokens: Sequence[int]) -> None:
        """These came from the store, which hears that they are used; nobody can publish them if it has lost them."""
        self._chain.cover(tokens)
        keys = self._chain.keys[first_block : first_block + blocks]
        if self._publisher.known.leading(keys) < blocks:
            self._gave_up()
        self._publisher.known.used(keys, self._origin.session)
        self._passed.append((first_block, first_block + blocks))
        self.loaded(0)

    def _stored_already(self, first_block: int, blocks: int) -> int:
        """How many of these blocks the store has, as far as it has all before them; it hears that they are used."""
        if first_block != (self.stored or 0):
            return 0
        known, keys = self._publisher.known, self._chain.keys[first_block : first_block + blocks]
        there = known.leading(keys)
        if there:
            known.used(keys[:there], self._origin.session)
            self.loaded(first_block + there)
        return there

    def finished(self, valid_tokens: int, tail: PageRef | None) -> None:
        """Keeps the bytes of the partly filled last page for the hand-off."""
        if tail is not None:
            self.tail = bytes(tail.view())
            tail.release()
        self.valid_tokens = valid_tokens
        self.changed.set()

    def set_back(self) -> None:
        """Nobody waits for blocks of a request that has to wait itself."""
        self._gave_up()

    def withhold(self) -> None:
        """The request has failed because its KV may be damaged: publishes nothing that is still queued."""
        self._soundness.sound = False

    @property
    def settled(self) -> bool:
        """The sequence has ended and everything it published is stored or given up."""
        return self.valid_tokens is not None and self._pending == 0

    def _published(self, first_block: int, blocks: int, stored: int) -> None:
        self._pending -= 1
        if stored < blocks:
            self._gave_up()
        if (self.stored or 0) == first_block:
            self.loaded(first_block + stored)
        self.changed.set()


def _release(pages: Sequence[PageRef]) -> None:
    for page in pages:
        page.release()
