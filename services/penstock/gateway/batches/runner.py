"""Takes up the batches that are not over, as long as the gateway runs."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog

from penstock.gateway.batches.records import StoredBatch
from penstock.gateway.batches.run import BatchRun, BatchShop
from penstock.gateway.batches.store import ClaimLost
from penstock.runtime.tasks import end, first_of, start

_MOST, _MOST_ENDING = 16, 32
"""Batches that a gateway runs at one time, one of each tenant; and with those that it only has to end."""
_AGAIN_S, _ANOTHERS_S = 10.0, 2.0
"""A batch that could not go on is tried again after so long; and one that another gateway has."""
_SWEEP_S = 600.0


class BatchRunner:
    """Runs batches: of each tenant the one whose window ends first; those that are cancelled or late it ends meanwhile.
    Run `keep` beside the gateway."""

    def __init__(self, shop: BatchShop) -> None:
        self._shop = shop
        self._running: dict[str, asyncio.Task[None]] = {}
        """By tenant; those that only have to be ended by their ids."""
        self._stirred = asyncio.Event()
        self._later: dict[str, float] = {}
        """When a batch may be tried again, by its id."""
        self._behind = False
        self._log = structlog.get_logger("penstock.gateway")

    def stir(self) -> None:
        """There is a new batch, or another wish."""
        self._stirred.set()

    async def keep(self) -> None:
        """Never returns. Cancelled, it ends what runs: the lines that have no result yet are left to whoever comes."""
        loop = asyncio.get_running_loop()
        swept_at = loop.time() - _SWEEP_S
        try:
            while True:
                self._stirred.clear()
                try:
                    if loop.time() - swept_at >= _SWEEP_S:
                        swept_at = loop.time()
                        await self._shop.store.sweep(self._shop.clock(), self._shop.kept_s)
                    await self._take_up(loop.time())
                    self._say(None)
                except OSError as error:
                    self._say(error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._shop.look_s):
                        await self._stirred.wait()
        finally:
            await end(*self._running.values())

    async def _take_up(self, now: float) -> None:
        self._later = {id: until for id, until in self._later.items() if until > now}
        for batch in sorted(await self._shop.store.open_batches(), key=lambda batch: (batch.expires_at, batch.order)):
            ends = batch.status == "cancelling" or batch.expires_at <= self._shop.clock()
            place = batch.id if ends else batch.tenant
            if len(self._running) >= (_MOST_ENDING if ends else _MOST) or place in self._running:
                continue
            if batch.id not in self._later:
                await self._begin(batch, place)

    async def _begin(self, batch: StoredBatch, place: str) -> None:
        """Runs a batch, if nobody else does, this gateway included."""
        claimed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                await self._run(batch, claimed)
            except Exception:  # a defect: told by who runs this task
                self._later[batch.id] = asyncio.get_running_loop().time() + _AGAIN_S
                raise
            finally:
                if not claimed.done():
                    claimed.set_result(False)
                self._running.pop(place, None)
                self._stirred.set()

        failed = self._shop.metrics.task_failed
        self._running[place] = start(run, name="batch", on_failure="log", failed=failed)
        await claimed  # the tenant's next one may be tried only when this one is somebody else's

    async def _run(self, batch: StoredBatch, claimed: asyncio.Future[bool]) -> None:
        now = asyncio.get_running_loop().time
        try:
            async with self._shop.store.claim(batch) as claim:
                if claim is None:
                    self._later[batch.id] = now() + _ANOTHERS_S
                    return
                claimed.set_result(True)
                await first_of(BatchRun(self._shop, claim).work(), claim.lost())
        except ClaimLost:
            self._later[batch.id] = now() + _ANOTHERS_S
            self._log.warning("another gateway may run a batch now", batch=batch.id)
        except OSError as error:
            self._later[batch.id] = now() + _AGAIN_S
            self._log.error("a batch can't go on; it is tried again", batch=batch.id, reason=str(error))

    def _say(self, error: OSError | None) -> None:
        if error is not None and not self._behind:
            self._log.error("batches can't be read; that is tried again", reason=str(error))
        elif error is None and self._behind:
            self._log.info("batches can be read again")
        self._behind = error is not None
