"""What a request says of the blocks that it is about to compute, so that other workers wait for them.

A claim is a hint: a store that does not hear of it, and a worker that does not keep it, cost others a wait at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from penstock.kv.client.client import StoreClient, StoreFault
from penstock.kv.pace import Pace
from penstock.runtime.metrics import WorkerMetrics

_LOG = structlog.get_logger("penstock.worker")


class PromptClaim:
    """The blocks of one request that this worker computes and will publish, as its store knows them."""

    def __init__(
        self,
        store: StoreClient,
        metrics: WorkerMetrics,
        pace: Callable[[int], Pace],
        *,
        least_s: float,
        sources: Sequence[str] = (),
    ) -> None:
        """`pace` predicts computing from that block on; what takes less than `least_s` seconds is not claimed, nor
        waited for. `sources` are stores of other hosts where it may be computed."""
        self._store = store
        self._metrics = metrics
        self._pace = pace
        self._least_s = least_s
        self._sources = sources
        self._number: int | None = None

    async def make(self, keys: Sequence[bytes], first_block: int) -> int:
        """Claims the blocks `keys`, which the store lacks, after it has waited for those that others compute; returns
        how many of the leading ones are stored by then."""
        if not keys or not self._store.connected:
            return 0
        pace = self._pace(first_block)
        if pace.seconds(len(keys)) - pace.queue_s < self._least_s:
            return 0
        if self._number is None:
            self._number = self._store.next_claim()
        try:
            claimed = await self._store.claim(self._number, keys, pace, self._sources)
        except StoreFault as fault:
            self._metrics.store_faults.labels("claim").inc()
            _LOG.warning("blocks are computed without a claim", blocks=len(keys), reason=str(fault))
            return 0
        if claimed.wait != "none":
            self._metrics.claim_waits.labels(claimed.wait).inc()
            self._metrics.awaited.inc(claimed.found)
        return claimed.found

    def withdraw(self) -> None:
        """The rest will not be published, or not soon; a second call does nothing."""
        number, self._number = self._number, None
        if number is not None:
            self._store.withdraw(number)
