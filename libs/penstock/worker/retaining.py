"""Keeps blocks as a request wishes: asks the store while the prompt is computed, and again with the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from penstock.kv.client.client import StoreClient, StoreFault
from penstock.runtime.metrics import WorkerMetrics
from penstock.runtime.tasks import end, start
from penstock.worker.order import Mark

_LOG = structlog.get_logger("penstock.worker")


@dataclass(frozen=True, slots=True)
class Kept:
    """The first `blocks` blocks are kept for at least `seconds`."""

    seconds: float = 0.0
    blocks: int = 0


def merge(grants: Sequence[Kept]) -> Kept:
    """Several promises as one: a block is kept as long as the best promise that covers it."""
    blocks = max((grant.blocks for grant in grants), default=0)
    times = [max(grant.seconds for grant in grants if grant.blocks > at) for at in range(blocks)]
    return Kept(min(times), blocks) if times else Kept()


class Retainer:
    """Asks the store to keep the blocks of one request. A failure is logged and counted, and promises no block."""

    def __init__(self, store: StoreClient, metrics: WorkerMetrics, marks: Sequence[Mark], namespace: bytes) -> None:
        self._store = store
        self._metrics = metrics
        self._marks = sorted(marks, key=lambda mark: (mark.blocks is None, mark.blocks))
        self._namespace = namespace
        self._promised = Kept()
        self._asking: asyncio.Task[None] | None = None

    def __bool__(self) -> bool:
        """Whether the request wishes anything to be kept."""
        return bool(self._marks)

    def begin(self, keys: Sequence[bytes]) -> None:
        """Begins to ask for the prompt's blocks in the background; the caller must call `close` once."""
        if self._marks:
            job = partial(self._ask_prompt, keys)
            self._asking = start(job, name="retain", on_failure="log", failed=self._metrics.task_failed)

    async def prompt(self) -> Kept:
        """The promise for the prompt; waits for the store's answer."""
        if self._asking is not None:
            await asyncio.wait([self._asking])
        return self._promised

    async def answer(self, keys: Sequence[bytes]) -> Kept:
        """Asks for the prompt and the answer, whose blocks are `keys` by now."""
        return await self._ask(keys) if self._marks else Kept()

    async def close(self) -> None:
        """Ends an ask that is still under way."""
        if self._asking is not None:
            await end(self._asking)

    async def _ask_prompt(self, keys: Sequence[bytes]) -> None:
        self._promised = await self._ask(keys)

    async def _ask(self, keys: Sequence[bytes]) -> Kept:
        grants = []
        try:
            for mark in self._marks:
                wanted = keys if mark.blocks is None else keys[: mark.blocks]
                if wanted:
                    grants.append(Kept(*await self._store.retain(wanted, mark.seconds, self._namespace)))
        except StoreFault as fault:
            self._metrics.store_faults.labels("retain").inc()
            _LOG.warning("blocks are not retained", reason=str(fault))
        return merge(grants)
