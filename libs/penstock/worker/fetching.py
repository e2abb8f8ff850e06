"""Blocks into the pages of one sequence: those that the engine has already, and those of the KV store.

The store is an optimisation, never an authority: every failure here is counted and logged, and the engine recomputes
the blocks.

Where layers forget, only the far part is fetched of blocks that lie far enough before the end of the prefix (see
penstock.kv.parts). Where it ends is known when it is loaded; if that is sooner than was planned, `conclude` fetches the
near parts that are needed after all.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog

from penstock.engine.hooks import LoadResult, PageWriter, PartedWriter, Source
from penstock.kv.client.client import NOBODY, Leased, Origin, StoreClient, StoreFault
from penstock.kv.parts import Reach
from penstock.runtime.metrics import StoringMetrics
from penstock.worker.claiming import PromptClaim
from penstock.worker.rates import FetchRates
from penstock.worker.stored import StoredKeys

_LEASE_BLOCKS = 512
_PARTS = 4
"""What one of so many parts of the blocks takes to compute, the store may take to bring some: by then it shows whether
they come sooner."""
_LOG = structlog.get_logger("penstock.worker")


@dataclass(kw_only=True)
class Fetcher:
    """Loads the stored prefix of one sequence, in one go or as it appears.

    `keys` name all full blocks of the sequence; `tiers` says of each loaded block where it was.
    """

    store: StoreClient
    metrics: StoringMetrics
    keys: Sequence[bytes]
    block_size: int
    known: StoredKeys
    """Learns which blocks the store gave, and hears which were in the engine's pages."""
    origin: Origin = NOBODY
    rates: FetchRates = field(default_factory=FetchRates)
    cost: Callable[[int], float] = lambda first_token: 0.0
    """Seconds to compute the block that begins with this token; 0: unknown."""
    queue_s: Callable[[], float] = lambda: 0.0
    """Seconds until the sequence begins to compute, if it has nothing to wait for."""
    least_wait_s: float = 0.0
    """For blocks that the store has to bring, however soon they are computed."""
    hands_on: bool = False
    """Whether another worker will fetch these blocks from the store."""
    reach: Reach | None = None
    """Of the layers that forget, where the store's client can read the far parts of blocks alone."""
    blocks: int = 0
    """Number of leading blocks that are in the pages."""
    tiers: list[str] = field(default_factory=list)
    fetched_bytes: int = 0
    """Of whole blocks that were not in pages, however much of each was read."""
    _told: int = 0
    """Blocks from pages of whose use the store has heard."""

    async def upto(self, count: int, pages: PageWriter, *, compares: bool = False, planned: int | None = None) -> bool:
        """Loads blocks until the first `count` are in the pages; False when neither the engine nor the store could give
        them all. When it `compares`, it does not wait longer for blocks that another load fetches, nor for those that
        the store has to bring, than their computing is worth, once the sequence could compute. `planned` is how many
        the prefix will have in the end; None: as many of `count` as the store has now. `conclude` makes that true."""
        try:
            return await self._upto(count, pages, compares, planned)
        finally:
            pages.settled(self.blocks)

    async def conclude(self, pages: PageWriter, *, compares: bool = False) -> None:
        """Makes what is in the pages a prefix behind which the text can go on: fetches the near parts that it lacks, as
        `upto` does. Where these are not to be had it ends before them, and no others are asked for."""
        if self.reach is None or not isinstance(pages, PartedWriter):
            return
        to_be_had = True
        while (first := pages.lacking(self.blocks)) < self.blocks:
            end, self.blocks = self.blocks, first
            pages.give_back(first)
            del self.tiers[first:]
            if to_be_had:
                await self.upto(end, pages, compares=compares, planned=end)
                to_be_had = self.blocks > first

    async def _upto(self, count: int, pages: PageWriter, compares: bool, planned: int | None) -> bool:
        begin = time.monotonic()
        until = begin + (self.queue_s() if compares else 0.0)
        patience_s = self._patience_s(count - self.blocks, until - begin) if compares else 0.0
        others_until = begin + patience_s  # once for all parts: who waited in vain asks the store from then on
        while self.blocks < count:
            self._plan(pages, max(count, planned or 0))
            within_s = max(0.0, others_until - time.monotonic()) if patience_s else None
            taken = await pages.take(self.blocks, count, within_s)
            self.blocks += taken
            self.tiers += ["worker"] * taken
            if self.blocks == count:
                break
            if not self.store.connected:
                self.metrics.store_faults.labels("away").inc()
                return False
            wanted = self.keys[self.blocks : min(count, self.blocks + _LEASE_BLOCKS)]
            begin, before = time.monotonic(), self.blocks
            try:
                wait_s = self._patience_s(len(wanted), until - begin) if compares else 0.0
                if planned is None:
                    planned = await self._found(count, pages)
                more = await self._some(wanted, pages, wait_s, planned)
                pages.settled(self.blocks)
                self.known.learn(self.keys[before : self.blocks])
            except StoreFault as fault:
                self.metrics.store_faults.labels("fetch").inc()
                _LOG.warning("fetch became a recompute", reason=str(fault))
                return False
            lost_s = time.monotonic() - max(begin, until)
            worth_it = more and lost_s < self._compute_s(before, self.blocks)
            if self.blocks < before + len(wanted) and not worth_it:
                return False
        return True

    @property
    def stored(self) -> int:
        """Leading blocks that the store has: it gave them, or is known to have them."""
        known, count = self.known.leading(self.keys[: len(self.tiers)]), 0
        for tier in self.tiers:
            if tier == "worker" and count >= known:
                break
            count += 1
        return count

    async def tell_uses(self) -> None:
        """Lets the store hear of the blocks that it has and that were taken from pages, once of each; waits for what it
        says of those that another worker will fetch."""
        stored = self.stored
        taken = [key for key, tier in zip(self.keys[:stored], self.tiers, strict=False) if tier == "worker"]
        new, self._told = taken[self._told :], len(taken)
        if self.hands_on:
            await self.known.confirm(new, self.origin.session)
        else:
            self.known.used(new, self.origin.session)

    def used(self, tokens: int) -> Counter[str]:
        """Counts the first `tokens` tokens by the tier of their blocks; tokens that were not loaded are left out."""
        counts: Counter[str] = Counter()
        for number, tier in enumerate(self.tiers[: -(-tokens // self.block_size)]):
            counts[tier] += min(self.block_size, tokens - number * self.block_size)
        return counts

    def _compute_s(self, first: int, end: int) -> float:
        """Seconds to compute these blocks; 0: unknown."""
        return sum(self.cost(block * self.block_size) for block in range(first, end))

    def _patience_s(self, count: int, free_s: float) -> float:
        """Seconds to wait for the next `count` blocks, when the first `free_s` cost nothing; 0: nobody knows."""
        compute_s = self._compute_s(self.blocks, self.blocks + max(1, count // _PARTS))
        return max(self.least_wait_s, max(0.0, free_s) + compute_s) if compute_s else 0.0

    def _far(self, end: int) -> int:
        """Leading blocks of which the far part is enough when the prefix has `end` blocks."""
        return 0 if self.reach is None else self.reach.far(end, self.block_size)

    def _plan(self, pages: PageWriter, end: int) -> None:
        if self.reach is not None and isinstance(pages, PartedWriter):
            pages.far_is_enough(self._far(end))

    async def _found(self, count: int, pages: PageWriter) -> int:
        """How many blocks the prefix will have, as far as it is worth asking: of few more a lease says it."""
        if self.reach is None or not isinstance(pages, PartedWriter) or count - self.blocks <= _LEASE_BLOCKS:
            return 0
        return self.blocks + await self.store.lookup(self.keys[self.blocks : count])

    async def _some(self, keys: Sequence[bytes], pages: PageWriter, wait_s: float, planned: int) -> bool:
        """Loads the leading blocks that the store gives within `wait_s`, or its time limit, of a prefix for which so
        many are planned; True when all were written and the store is bringing more."""
        begin, first = time.monotonic(), self.blocks

        def far(found: int) -> int:
            return max(0, self._far(max(planned, first + found)) - first) if isinstance(pages, PartedWriter) else 0

        async with self.store.lease(keys, self.origin, checked=False, on_device=True, wait_s=wait_s, far=far) as leased:
            near = leased.on_device.views
            blocks: list[Source] = [*near, *leased.blocks]
            copy = partial(_copy, leased, len(near))
            if blocks and isinstance(pages, PartedWriter):
                written = await pages.write(first, blocks, copy, far=len(near) + leased.far)
            else:
                written = await pages.write(first, blocks, copy) if blocks else 0
            if not leased.on_device.still_valid():
                written = 0  # blocks from the device have no other check
            tiers = ["gpu"] * len(near) + leased.tiers
            tiers, size = tiers[:written], sum(view.nbytes for view in blocks[:written])
        self.blocks += written
        self.tiers += tiers
        self.fetched_bytes += size
        self.metrics.fetched.inc(written)
        self.rates.fetched(tiers, size, time.monotonic() - begin)
        return leased.more and written == len(blocks)


def _copy(leased: Leased, on_device: int, index: int, into: memoryview) -> bool:
    return leased.copy(index - on_device, into)


class StoredPrefix:
    """KvSource: the longest prefix that the engine and the store hold, or soon will, up to `limit` blocks."""

    def __init__(
        self, fetcher: Fetcher, limit: int, loaded: Callable[[int], None], claim: PromptClaim | None = None
    ) -> None:
        """`loaded` is told how many leading blocks came from the store. With a `claim` the blocks that other workers
        compute are waited for, and the others claimed."""
        self.fetcher = fetcher
        self._limit = limit
        self._loaded = loaded
        self._claim = claim

    async def load(self, pages: PageWriter) -> LoadResult:
        """Asks once for all blocks; the engine computes those that are missing, or asks for them again later."""
        fetcher, waited = self.fetcher, 0.0
        await fetcher.upto(self._limit, pages, compares=True)
        await fetcher.conclude(pages, compares=True)
        if fetcher.blocks < self._limit and self._claim is not None:
            begin = time.monotonic()
            found = await self._claim.make(fetcher.keys[fetcher.blocks : self._limit], fetcher.blocks)
            waited = time.monotonic() - begin
            if found:
                await fetcher.upto(fetcher.blocks + found, pages)
                await fetcher.conclude(pages)
        await fetcher.tell_uses()
        self._loaded(fetcher.stored)
        valid = fetcher.blocks * fetcher.block_size
        return LoadResult(valid_tokens=valid, cached_tokens=valid, stored_blocks=fetcher.stored, waited_s=waited)

    async def load_more(self, pages: PageWriter) -> LoadResult:
        """As `load`: blocks that are in the pages already are not asked for."""
        return await self.load(pages)
