"""Opening a worker: the order in which its parts start and end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import grpc
import structlog

from penstock.engine.engine import Engine
from penstock.engine.hooks import Drafter
from penstock.engine.pictures.shown import ShownTiles
from penstock.kv.client.client import StoreClient, open_store
from penstock.rpc.channels import open_channels
from penstock.rpc.identity import MemberIdentity
from penstock.rpc.server import GONE_S, serve
from penstock.runtime.cores import keep_to
from penstock.runtime.metrics import WorkerMetrics
from penstock.v1 import router_pb2
from penstock.worker.config import WorkerConfig
from penstock.worker.device import check_device, device_of
from penstock.worker.examining import examined
from penstock.worker.lending import PageLending
from penstock.worker.pictures import HeldPictures
from penstock.worker.publishing import BlockPublisher, open_publisher
from penstock.worker.rotation import in_rotation
from penstock.worker.stages.speaking import StagesAway
from penstock.worker.stored import StoredKeys
from penstock.worker.turns import shared_cores
from penstock.worker.worker import Worker, stored_spec

_LOG = structlog.get_logger("penstock.worker")
_PUBLISH_SHARE = 4
"""At most a quarter of the page pool, or the pages of two steps, may wait to be published."""
_LATE_S = 0.2
"""Seconds for calls that arrived while the worker was leaving, after the `drain_s` for those before them."""


@dataclass(frozen=True)
class ServedWorker:
    """A worker that serves at `address`."""

    address: str
    worker: Worker
    done: asyncio.Event
    """Set when a router has told the worker to end, and nothing runs any more."""

    @property
    def metrics(self) -> WorkerMetrics:
        """The worker's metrics."""
        return self.worker.metrics


@asynccontextmanager
async def open_worker(
    config: WorkerConfig,
    role: router_pb2.Role.ValueType,
    register: Callable[[grpc.aio.Server, Worker], None],
    services: Sequence[str],
    *,
    metrics: WorkerMetrics,
    drafter: Drafter | None = None,
) -> AsyncIterator[ServedWorker]:
    """Loads the model, serves, joins the router. When the block ends the worker drains and leaves the router, then its
    server stops, then the store's client, then the engine. The caller makes `metrics`, so that its own tasks count too.
    """
    keep_to(config.cores)
    lends = config.lend and bool(config.kvstore) and role != router_pb2.ROLE_PREFILL and not config.seal
    settings = replace(config.engine, shared_pages=lends, stages_apart=bool(config.stage_hosts))
    check_device(settings)
    device = None if config.seal or config.engine.split else device_of(config.engine.device)
    member = MemberIdentity.of(config.member_tls, "worker")
    away = StagesAway(config.stage_hosts, config.member_tls)
    async with (
        open_channels(member) as channels,
        shared_cores(config.engine) as baton,
        Engine.open(settings, drafter, away.load, baton=baton, give_up=away.give_up) as engine,
    ):
        _say_loaded(engine)
        metrics.watch(lambda: _figures(engine))
        metrics.watch_drafts(lambda: engine.stats().drafts)
        metrics.watch_steps(engine.stats().step_tokens, lambda: _waiting(engine))
        metrics.describe(block_size=engine.spec.block_size, pages=engine.stats().total_pages, dtype=engine.spec.dtype)
        store_channel = channels.to(config.kvstore, "store") if config.kvstore else None
        name = f"worker-{os.getpid()}"
        two_steps = 2 * config.engine.max_batch_tokens // config.engine.block_size
        waiting_pages = max(engine.stats().total_pages // _PUBLISH_SHARE, two_steps)
        async with (
            open_store(
                store_channel,
                name,
                stored_spec(config, engine),
                config.host,
                timeout_s=config.store_timeout_s,
                device=device,
                parts=engine.parts,
                failed=metrics.task_failed,
            ) as store,
            _publisher(store, metrics, waiting_pages, engine=engine) as publisher,
        ):
            worker = Worker(config, engine, store=store, publisher=publisher, channels=channels, metrics=metrics)
            metrics.watch(partial(_of_pictures, worker.pictures, engine.shown))
            async with serve(
                config.address,
                lambda server: register(server, worker),
                services,
                grace=_LATE_S,
                member=member,
                stall_s=GONE_S,
                examine=partial(examined, engine, store, has_store=bool(config.kvstore)),
            ) as server:
                address = config.address.at(server.port)
                async with in_rotation(worker, role, config.advertise or address, server) as done:
                    yield ServedWorker(address, worker, done)


@asynccontextmanager
async def _publisher(
    store: StoreClient, metrics: WorkerMetrics, waiting_pages: int, *, engine: Engine
) -> AsyncIterator[BlockPublisher]:
    known = StoredKeys(store, engine.pool, metrics)
    lending = None
    if engine.arena is not None:
        lending = lent = PageLending(store, engine.pool, engine.arena, known=known, metrics=metrics)
        metrics.watch(lambda: {WorkerMetrics.LENT: len(lent), WorkerMetrics.UNSAVED: lent.lost})
    async with open_publisher(
        store, metrics, waiting_pages, known=known, finite=engine.finite, lending=lending
    ) as publisher:
        yield publisher


def _say_loaded(engine: Engine) -> None:
    kept = "in torch's memory" if engine.packed is None else str(engine.packed)
    _LOG.info("loaded", weights=kept, peak_mb=engine.stats().peak_bytes // 10**6)


def _figures(engine: Engine) -> dict[str, float]:
    stats = engine.stats()
    rate = stats.prefill_tokens_per_s
    return {
        WorkerMetrics.RUNNING: stats.running,
        WorkerMetrics.WAITING: stats.waiting + stats.loading,
        WorkerMetrics.KV_USAGE: 1 - stats.free_pages / stats.total_pages,
        WorkerMetrics.RESIDENT: stats.resident_pages,
        WorkerMetrics.SHARED: stats.shared_pages,
        WorkerMetrics.TAIL_TOKENS: stats.copied_tokens,
        WorkerMetrics.PREEMPTIONS: stats.preemptions,
        WorkerMetrics.DRAFT_FAULTS: stats.draft_failures,
        WorkerMetrics.DRAFT_WAIT_S: stats.drafts.waited_s,
        WorkerMetrics.LOOKUP_DEFECTS: stats.lookup_defects,
        WorkerMetrics.TURNS: stats.turns.turns,
        WorkerMetrics.TURN_WAIT_S: stats.turns.waited_s,
        WorkerMetrics.TURNS_GIVEN_UP: stats.turns.given_up,
        WorkerMetrics.QUEUE_S: stats.queued_tokens / rate if rate else 0.0,
        WorkerMetrics.QUEUED_TOKENS: stats.queued_tokens,
        WorkerMetrics.PREFILL_RATE: rate,
        WorkerMetrics.BUSY_S: stats.busy_s,
        WorkerMetrics.KV_TOKENS: stats.total_pages * engine.spec.block_size,
        WorkerMetrics.EXPERT_IMBALANCE: engine.expert_imbalance,
        WorkerMetrics.ADAPTERS: len(engine.adapters.names),
        WorkerMetrics.ADAPTERS_HELD: engine.adapters.in_memory,
        WorkerMetrics.ADAPTER_BYTES: engine.adapters.nbytes,
        WorkerMetrics.ADAPTER_LOADS: engine.adapters.loads,
    }


def _of_pictures(held: HeldPictures, shown: ShownTiles | None) -> dict[str, float]:
    return {
        WorkerMetrics.PICTURES: len(held),
        WorkerMetrics.PICTURE_BYTES: held.used_bytes,
        WorkerMetrics.TILES_COMPUTED: shown.computed if shown else 0,
        WorkerMetrics.TILES_FOUND: shown.found if shown else 0,
        WorkerMetrics.TILE_S: shown.took_s if shown else 0.0,
    }


def _waiting(engine: Engine) -> dict[str, int]:
    stats = engine.stats()
    return {"capacity": stats.waiting, "deferred": stats.loading}
