"""Full pages of the engine into the KV store.

A store that is away, slow or wrong costs cached blocks, never a request: every failure here is counted and logged,
and the pages are released. KV that is not finite stays here: it would fail every later request with the same prompt.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from itertools import takewhile

import structlog

from penstock.engine.hooks import PageRef
from penstock.kv.client.client import NOBODY, BlockPut, Origin, StoreClient, StoreFault
from penstock.kv.identity import extend_keys
from penstock.runtime.metrics import WorkerMetrics
from penstock.runtime.tasks import being_cancelled, beside, within
from penstock.runtime.threads import to_its_end

_LOG = structlog.get_logger("penstock.worker")


@dataclass
class Soundness:
    """Whether the KV of one request may be published. Once it may not, nothing more of the request is."""

    sound: bool = True


@dataclass
class _Batch:
    blocks: list[BlockPut]
    origin: Origin
    pages: Sequence[PageRef]
    done: Callable[[int], None]
    context: Context
    soundness: Soundness


class BlockPublisher:
    """Stores filled pages, in order, from one queue; made by `open_publisher`.

    Pages stay referenced until their bytes are in the store. A queue longer than `max_pages` drops new pages
    instead of holding memory that sequences need.
    """

    def __init__(
        self,
        store: StoreClient,
        metrics: WorkerMetrics,
        max_pages: int,
        *,
        finite: Callable[[memoryview], bool],
        thread: Executor,
    ) -> None:
        """`finite` says whether a block's bytes are finite numbers; `thread` calls it."""
        self._store = store
        self._metrics = metrics
        self._max_pages = max_pages
        self._finite = finite
        self._thread = thread
        self._queued = 0
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
        if not self._store.connected or self._queued + len(pages) > self._max_pages:
            self._metrics.store_faults.labels("publish").inc()
            _release(pages)
            done(0)
            return
        self._queued += len(pages)
        self._batches.append(_Batch(blocks, origin, pages, done, context, soundness))
        self._wake.set()

    async def run(self) -> None:
        """Stores queued blocks until it is cancelled. When it raises, only the blocks that it was storing are lost."""
        while True:
            while self._batches:
                await self._store_one(self._batches.popleft())
            self._wake.clear()
            await self._wake.wait()

    def close(self) -> None:
        """Releases every page that is still queued."""
        while self._batches:
            _release(self._batches.popleft().pages)

    async def _store_one(self, batch: _Batch) -> None:
        stored = 0
        try:
            blocks = batch.blocks[: await self._sound(batch)]
            if blocks:
                put = self._store.put(blocks, batch.origin)
                self._metrics.published.inc(await within(batch.context, put))
                stored = len(blocks)
        except (StoreFault, asyncio.CancelledError) as fault:
            if isinstance(fault, asyncio.CancelledError) and being_cancelled():
                raise
            self._metrics.store_faults.labels("publish").inc()
            _LOG.warning("blocks were not published", blocks=len(batch.blocks), reason=str(fault))
        finally:
            self._queued -= len(batch.pages)
            _release(batch.pages)
            batch.done(stored)

    async def _sound(self, batch: _Batch) -> int:
        """How many leading blocks may be stored: none from the first bad one of the request on."""
        request = batch.soundness
        if not request.sound:
            return 0
        count = await to_its_end(self._thread, lambda: self._count_finite(batch.blocks))
        sound = request.sound  # it may have failed meanwhile
        if count < len(batch.blocks):
            request.sound = False
            self._metrics.store_faults.labels("not_finite").inc()
            _LOG.error("blocks are not published: their KV is not finite", blocks=len(batch.blocks) - count)
        return count if sound else 0

    def _count_finite(self, blocks: Sequence[BlockPut]) -> int:
        return sum(1 for _ in takewhile(lambda block: self._finite(memoryview(block.data)), blocks))


@asynccontextmanager
async def open_publisher(
    store: StoreClient, metrics: WorkerMetrics, max_pages: int, *, finite: Callable[[memoryview], bool]
) -> AsyncIterator[BlockPublisher]:
    """A publisher that works for the length of the block; `finite` is called in a thread."""
    with ThreadPoolExecutor(1, "publish") as thread:
        publisher = BlockPublisher(store, metrics, max_pages, finite=finite, thread=thread)
        try:
            async with beside(publisher.run, name="publish", on_failure="restart", failed=metrics.task_failed):
                yield publisher
        finally:
            publisher.close()


class BlockSink:
    """KvSink: publishes each full block of one sequence, and keeps count for the hand-off."""

    def __init__(
        self,
        publisher: BlockPublisher,
        root: bytes,
        keys: Sequence[bytes],
        block_size: int,
        *,
        origin: Origin = NOBODY,
        cost: Callable[[int], float] = lambda _first_token: 0.0,
    ) -> None:
        """`keys` are those known so far, from block 0; `cost` gives a block's seconds by its first token."""
        self._publisher = publisher
        self._origin = origin
        self._cost = cost
        self._root = root
        self._keys = list(keys)
        self._block_size = block_size
        self._context = copy_context()
        self._pending = 0
        self._soundness = Soundness()
        self.stored: int | None = None
        """Leading blocks known to be stored; None until the first report. A gap ends the count."""
        self.changed = asyncio.Event()
        self.tail: bytes = b""
        self.valid_tokens: int | None = None
        """Leading tokens with KV; None until the sequence has ended normally."""

    @property
    def keys(self) -> Sequence[bytes]:
        """The keys of all full blocks so far, at least those of the prompt."""
        return self._keys

    def loaded(self, blocks: int) -> None:
        """Notes that the first `blocks` blocks came from the store."""
        self.stored = max(self.stored or 0, blocks)
        self.changed.set()

    def filled(self, first_block: int, pages: Sequence[PageRef], tokens: Sequence[int]) -> None:
        """Queues the blocks for the store; their pages are released when it has them or is given up."""
        size, end = self._block_size, first_block + len(pages)
        self._keys = extend_keys(self._root, self._keys, tokens[: end * size], size)
        blocks = [
            BlockPut(
                key=self._keys[index],
                parent=self._keys[index - 1] if index else self._root,
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
            lambda stored: self._published(first_block, stored),
            self._context,
            soundness=self._soundness,
        )

    def finished(self, valid_tokens: int, tail: PageRef | None) -> None:
        """Keeps the bytes of the partly filled last page for the hand-off."""
        if tail is not None:
            self.tail = bytes(tail.view())
            tail.release()
        self.valid_tokens = valid_tokens
        self.changed.set()

    def withhold(self) -> None:
        """The request has failed because its KV may be damaged: publishes nothing that is still queued."""
        self._soundness.sound = False

    @property
    def settled(self) -> bool:
        """The sequence has ended and everything it published is stored or given up."""
        return self.valid_tokens is not None and self._pending == 0

    def _published(self, first_block: int, stored: int) -> None:
        self._pending -= 1
        if (self.stored or 0) == first_block:
            self.stored = first_block + stored
        self.changed.set()


def _release(pages: Sequence[PageRef]) -> None:
    for page in pages:
        page.release()
