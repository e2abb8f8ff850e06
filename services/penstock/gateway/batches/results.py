"""The results of a batch on their way into the store: those that are there together are written together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from penstock.gateway.batches.lines import ANY_LENGTH, LineResult, recorded, split
from penstock.gateway.batches.records import LinesUsage, StoredBatch
from penstock.gateway.batches.store import BatchClaim, BatchStore
from penstock.runtime.metrics import GatewayMetrics

_AT_ONCE = 256
_SAVE_S = 1.0
"""The record of a batch gets its counts so often."""


class LineResults:
    """Owner of what is written for a batch while it is claimed. Everything here raises ClaimLost and OSError."""

    def __init__(self, store: BatchStore, claim: BatchClaim, metrics: GatewayMetrics) -> None:
        self.batch = claim.batch
        """With the counts of what is written."""
        self.done: set[str] = set()
        """Lines that have results, by their custom ids."""
        self.sizes = {True: 0, False: 0}
        """Bytes of the answers and of the errors."""
        self._store = store
        self._claim = claim
        self._metrics = metrics
        self._ready: list[tuple[LineResult, asyncio.Future[None]]] = []
        self._stirred = asyncio.Event()
        self._closed = False
        self._saved = self.batch

    async def recall(self) -> None:
        """Finds what was written before."""
        counts, usage = {True: 0, False: 0}, LinesUsage()
        for ok in (True, False):
            pieces = self._store.read(self.batch.tenant, self.batch.results(ok))
            async for lines in split(pieces, ANY_LENGTH):
                for _, line in lines:
                    found = recorded(line, ok)
                    self.done.add(found.custom_id)
                    usage = usage.plus(found.usage)
                    counts[ok] += 1
                    self.sizes[ok] += len(line) + 1
        self.batch = replace(self.batch, completed=counts[True], failed=counts[False], usage=usage)

    async def keep(self, result: LineResult) -> None:
        """Returns when the result is in the store. Whoever is cancelled meanwhile leaves it to be written."""
        written = asyncio.get_running_loop().create_future()
        self._ready.append((result, written))
        self._stirred.set()
        await written

    async def write(self) -> None:
        """Writes what comes, until `close`, and the rest then. Not to be cancelled as long as the claim is used: nobody
        would know what is written."""
        loop = asyncio.get_running_loop()
        saved_at = loop.time() - _SAVE_S
        while not self._closed or self._ready:
            if not self._ready:
                self._stirred.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_SAVE_S if self._changed else None):
                        await self._stirred.wait()
            ready, self._ready = self._ready[:_AT_ONCE], self._ready[_AT_ONCE:]
            await self.add([result for result, _ in ready])
            for _, written in ready:
                if not written.done():
                    written.set_result(None)
            if self._changed and loop.time() - saved_at >= _SAVE_S:
                with suppress(OSError):  # its counts; the lines are written
                    await self.save()
                saved_at = loop.time()

    @property
    def _changed(self) -> bool:
        """Whether there are results of which the record does not know."""
        return (self.batch.completed, self.batch.failed) != (self._saved.completed, self._saved.failed)

    def close(self) -> None:
        """No further results come."""
        self._closed = True
        self._stirred.set()

    async def add(self, results: Sequence[LineResult]) -> None:
        """Writes results."""
        if not results:
            return
        await self._claim.append(*([one.written for one in results if one.ok is ok] for ok in (True, False)))
        counts, usage = {True: 0, False: 0}, self.batch.usage
        for result in results:
            self.done.add(result.custom_id)
            counts[result.ok] += 1
            self.sizes[result.ok] += len(result.written)
            usage = usage.plus(result.usage)
        batch = self.batch
        self.batch = replace(
            batch, completed=batch.completed + counts[True], failed=batch.failed + counts[False], usage=usage
        )
        for ok, outcome in ((True, "answered"), (False, "failed")):
            self._metrics.batch_lines.labels(outcome).inc(counts[ok])

    async def save(self, batch: StoredBatch | None = None) -> None:
        """Keeps the batch as it is now, or changed to `batch`."""
        await self._claim.save(batch or self.batch)
        self._saved = self.batch = batch or self.batch
