"""Blocks that stay where they were computed: the worker lends them to its store instead of copying them there.

Whoever else wants such a block gets it from the store, which copies it from the page. So long as nobody does, a host
has it once. Before a page is needed for something else, its block is *saved*: the store copies it. A page whose block
leaves all the same first loses its epoch, so that no late reader takes what is written there next.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress

import structlog

from penstock.engine.hooks import PageRef
from penstock.engine.pages import PagePool
from penstock.kv.bytes.arena import Arena
from penstock.kv.client.client import BlockPut, Origin, StoreClient, StoreFault
from penstock.kv.client.lending import BlockLoan
from penstock.runtime.metrics import WorkerMetrics
from penstock.worker.stored import StoredKeys

_AHEAD = 8
"""One page in so many is saved ahead of its need."""
_SAVED_AT_ONCE = 64
_AGAIN_S = 1.0
"""What the store did not hear of because it failed is said again then, or sooner when there is more to say."""
_LOG = structlog.get_logger("penstock.worker")


class PageLending:
    """The blocks that the store may take from a pool's pages. A NameWatcher; `run` tells the store what it must
    hear."""

    def __init__(
        self, store: StoreClient, pool: PagePool, memory: Arena, *, known: StoredKeys, metrics: WorkerMetrics
    ) -> None:
        self.lost = 0
        """Blocks that left their pages before they were saved."""
        self._store = store
        self._pool = pool
        self._memory = memory
        self._known = known
        self._metrics = metrics
        self._attachment = ""
        """The one that takes blocks from the pages, and has heard of all loans."""
        self._shown = ""
        """The one that was shown the pages last."""
        self._asked = ""
        """The last one that either takes blocks from the pages, or has said that it does not."""
        self._loans: dict[bytes, BlockLoan] = {}
        self._saved: set[bytes] = set()
        """Those of the loans that the store has copied, or was asked to."""
        self._ended: dict[bytes, None] = {}
        """Loans whose end the store has not heard of."""
        self._epochs = itertools.count(1)
        self._telling = asyncio.Lock()
        """Held while the store is told or asked something, so that no message overtakes another."""
        self._wake = asyncio.Event()
        pool.watch(self)
        pool.trimmer = self._trim
        store.on_attach(self._wake.set)
        self._wake.set()

    def __len__(self) -> int:
        """Blocks that the store may take from pages."""
        return len(self._loans)

    # -- what it is told

    def block_named(self, key: bytes) -> None:
        """The pool has less room."""
        self._look()

    def block_forgotten(self, key: bytes) -> None:
        """The page will be written to: nobody takes the block from it any more."""
        loan = self._loans.get(key)
        if loan is not None:
            self.lost += key not in self._saved
            self._end(loan)
        self._look()

    def _end(self, loan: BlockLoan) -> None:
        self._memory.set_epoch(loan.page, 0)
        del self._loans[loan.key]
        self._saved.discard(loan.key)
        self._ended[loan.key] = None
        self._wake.set()

    def _trim(self) -> None:
        """Blocks over the number that may stay leave as soon as they are saved."""
        if self.on:
            self._wake.set()
        else:
            self._pool.trim()

    def _look(self) -> None:
        if self._short(self._ahead // 2) > 0:
            self._wake.set()

    @property
    def _ahead(self) -> int:
        return max(1, self._pool.total // _AHEAD)

    def _short(self, ahead: int) -> int:
        """How many blocks should be safe beyond those that are, so that the next `ahead` pages cost none."""
        return max(self._pool.over, ahead - self._pool.unnamed) - self._pool.chosen

    # -- lending

    @property
    def on(self) -> bool:
        """Whether the store takes blocks from the pages."""
        return bool(self._attachment) and self._store.attachment == self._attachment

    async def lend(self, blocks: Sequence[BlockPut], pages: Sequence[PageRef], origin: Origin) -> list[BlockPut]:
        """Lends the blocks in `pages`, which are referenced for the length of the call; returns those of them that
        have to be put, because they are not the pool's only ones of their keys. Raises StoreFault."""
        if not self.on:
            return list(blocks)
        mine = [
            (block, page.page)
            for block, page in zip(blocks, pages, strict=True)
            if block.key not in self._loans and self._pool.find(block.key) == page.page
        ]
        vouched = await self._store.lending.vouch([(block.key, block.data) for block, _ in mine])
        async with self._telling:
            loans = [
                BlockLoan(
                    key=block.key,
                    parent=block.parent,
                    first_token=block.first_token,
                    seconds=block.seconds,
                    page=page,
                    epoch=next(self._epochs),
                    checksum=said.checksum,
                    behind=said.behind,
                    origin=origin,
                )
                for (block, page), said in zip(mine, vouched, strict=True)
                if block.key not in self._loans and self._pool.find(block.key) == page
            ]
            await self._tell(loans)
        self._look()
        self._metrics.lent.inc(len(loans))
        return [block for block in blocks if block.key not in self._loans]

    async def _tell(self, loans: Sequence[BlockLoan]) -> None:
        """Makes new loans, or none of them."""
        for loan in loans:
            self._memory.set_epoch(loan.page, loan.epoch)
            self._loans[loan.key] = loan
            self._ended.pop(loan.key, None)
        try:
            await self._store.lending.lend(loans, self._memory)
        except BaseException:
            for loan in loans:
                if self._loans.get(loan.key) is loan:
                    self._end(loan)
            raise

    # -- what the store must hear

    async def run(self) -> None:
        """Opens the pages for each new attachment, tells of ended loans and has blocks saved in time, until
        cancelled."""
        again_s: float | None = None
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(again_s):
                    await self._wake.wait()
            self._wake.clear()
            again_s = None
            try:
                await self._catch_up()
            except StoreFault as fault:
                again_s = _AGAIN_S
                self._pool.trim()
                self._metrics.store_faults.labels("lend").inc()
                _LOG.warning("the store does not hear of lent blocks", reason=str(fault))

    async def _catch_up(self) -> None:
        if self._store.attachment not in ("", self._asked):
            await self._begin(self._store.attachment)
        if not self.on:
            self._pool.trim()
            return
        async with self._telling:
            ended = list(self._ended)
            await self._store.lending.lend([], self._memory, ended)
            for key in ended:
                del self._ended[key]
        await self._save()

    async def _begin(self, attachment: str) -> None:
        """Shows the pages to a store that has not seen them, and lends anew what is in them."""
        if self._shown != attachment:
            try:
                refused = await self._store.lending.open(self._memory)
            except StoreFault as fault:
                refused = str(fault)  # it may be an older one
            if refused:
                _LOG.info("blocks are copied to the store as they are computed", reason=refused)
                self._asked = attachment
                return
            if self._store.attachment != attachment:
                return
            self._shown = attachment
            self._ended.clear()
            self._saved.clear()
        async with self._telling:
            loans = list(self._loans.values())
            await self._store.lending.lend(loans, self._memory)
        _LOG.info("blocks are lent to the store, and stay in this worker's pages")
        self._known.learn(loan.key for loan in loans)
        self._asked = self._attachment = attachment

    async def _save(self) -> None:
        """Settles which blocks leave next, and has the store copy them, so that there is room for a while. When what is
        idle is too little for that, live sequences fill the pool, and everything is copied at once."""
        if self._short(self._ahead // 2) <= 0:
            chosen = self._pool.choose(self._pool.chosen) if self._pool.over else ()
            if all(key in self._saved or key not in self._loans for key in chosen):
                self._pool.trim(len(chosen))
            return
        needed = max(self._pool.over, self._ahead - self._pool.unnamed)
        leaving = self._pool.choose(needed)
        wanted = leaving if len(leaving) == needed else list(self._loans)
        wanted = [key for key in wanted if key in self._loans and key not in self._saved]
        for start in range(0, len(wanted), _SAVED_AT_ONCE):
            some = wanted[start : start + _SAVED_AT_ONCE]
            async with self._telling:
                self._metrics.saved.inc(await self._store.lending.save(some))
            self._saved.update(key for key in some if key in self._loans)
        self._pool.trim(self._pool.chosen)
