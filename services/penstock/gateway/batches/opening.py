"""Opens the store of files and batches that the settings name, for clients and for the runner."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.gateway.batches.answering import LineAnswers
from penstock.gateway.batches.desk import BatchDesk
from penstock.gateway.batches.files import FileBounds, FileDesk
from penstock.gateway.batches.in_directory import open_directory_batches
from penstock.gateway.batches.in_redis import open_redis_batches
from penstock.gateway.batches.records import Clock
from penstock.gateway.batches.run import BatchShop
from penstock.gateway.batches.runner import BatchRunner
from penstock.gateway.batches.store import BatchStore
from penstock.gateway.batches.window import LineWindow
from penstock.gateway.completing.threads import Threads
from penstock.gateway.config import GatewayConfig
from penstock.runtime.metrics import GatewayMetrics
from penstock.runtime.redis_client import REDIS_SCHEMES
from penstock.runtime.tasks import Failed, beside


class Batches:
    """What a gateway has for batches, before it can answer any line."""

    def __init__(self, store: BatchStore, config: GatewayConfig, metrics: GatewayMetrics, clock: Clock) -> None:
        self._store = store
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._runner: BatchRunner | None = None
        bounds = FileBounds(
            bytes=config.max_file_bytes,
            tenant_bytes=config.max_tenant_file_bytes,
            tenant_files=config.max_tenant_files,
            kept_s=config.batch_kept_s,
        )
        files = FileDesk(store, bounds, clock)
        self.desk = BatchDesk(store, files, clock, most=config.max_tenant_batches, stir=self._stir)

    @asynccontextmanager
    async def running(self, answers: LineAnswers, threads: Threads) -> AsyncIterator[None]:
        """Runs batches for the length of the block."""
        config = self._config
        shop = BatchShop(
            store=self._store,
            answers=answers,
            window=LineWindow(config.max_live_lines),
            threads=threads,
            metrics=self._metrics,
            clock=self._clock,
            most_lines=config.max_batch_lines,
            most_bytes=config.max_body_bytes,
            kept_s=config.batch_kept_s,
        )
        self._runner = BatchRunner(shop)
        failed = self._metrics.task_failed
        async with beside(self._runner.keep, name="batches", on_failure="restart", failed=failed):
            yield

    def _stir(self) -> None:
        if self._runner is not None:
            self._runner.stir()


@asynccontextmanager
async def open_batches(
    config: GatewayConfig, metrics: GatewayMetrics, clock: Clock = time.time
) -> AsyncIterator[Batches | None]:
    """The batches of a gateway for the length of the block; None where they are not kept. Raises ConfigError."""
    if not config.batch_store:
        yield None
        return
    async with _opened(config.batch_store, metrics.task_failed) as store:
        yield Batches(store, config, metrics, clock)


@asynccontextmanager
async def _opened(where: str, failed: Failed) -> AsyncIterator[BatchStore]:
    if where.startswith(REDIS_SCHEMES):
        async with open_redis_batches(where, failed) as in_redis:
            yield in_redis
    else:
        async with open_directory_batches(Path(where)) as in_directory:
            yield in_directory
