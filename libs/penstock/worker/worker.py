"""A worker: one engine, the store it reads and feeds, and its place in the router's registry."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass

import grpc
import structlog

from penstock.engine.engine import Engine
from penstock.engine.errors import EngineBusy, EngineClosed, EngineError, RequestRefused
from penstock.engine.hooks import Drafter, KvSource
from penstock.engine.request import Request, Update
from penstock.errors import Internal, InvalidRequest, Overloaded, Unavailable
from penstock.kv.client.client import Origin, StoreClient, open_store
from penstock.kv.cost import PrefillCost
from penstock.kv.identity import block_keys
from penstock.kv.spec import spec_to_message
from penstock.rpc.channels import Channels, open_channels
from penstock.rpc.join import stay_joined
from penstock.rpc.server import RpcServer, serve
from penstock.runtime.config import ConfigError
from penstock.runtime.cores import parse_cores, stay_on
from penstock.runtime.metrics import WorkerMetrics
from penstock.v1 import common_pb2, router_pb2
from penstock.worker.blocks import BlockSink, Fetcher, Publisher, StoredPrefix, open_publisher
from penstock.worker.config import WorkerConfig
from penstock.worker.device import check_device, device_of
from penstock.worker.links import Links
from penstock.worker.retaining import Mark, Retainer

_LOG = structlog.get_logger("penstock.worker")
_JOIN_PATIENCE_S = 5.0
"""How long a worker waits for its router before it says that it is ready all the same."""
_PUBLISH_SHARE = 4
"""At most a quarter of the page pool, or the pages of two steps, may wait to be published."""


@dataclass
class Work:
    """What one request brings along: where its KV comes from and where it goes."""

    fetcher: Fetcher
    fetchable: int
    """Leading blocks without the last given token, which somebody has to compute for its logits."""
    sink: BlockSink
    retainer: Retainer

    def cache_use(self, update: Update) -> common_pb2.CacheUse:
        """Where the KV of the given tokens came from: what was fetched and used, and what steps computed.

        Two counts of two parts, which nothing here makes agree.
        """
        return common_pb2.CacheUse(computed=update.computed_tokens, **self.fetcher.used(update.cached_tokens))


class Worker:
    """What a worker's servicer works with; made by `open_worker`."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        store: StoreClient,
        publisher: Publisher,
        channels: Channels,
        metrics: WorkerMetrics,
    ) -> None:
        self.config = config
        self.engine = engine
        self.store = store
        self.publisher = publisher
        self.channels = channels
        self.metrics = metrics
        self.links = Links()
        self.changed = asyncio.Event()
        """Set when the load has changed."""

    def work(self, message: common_pb2.Request) -> Work:
        """The hooks of one request."""
        tokens = [*message.prompt_ids, *message.output_ids]
        size = self.engine.spec.block_size
        keys = block_keys(message.cache_root, tokens, size)
        origin = Origin(message.session, message.namespace, tuple(message.sources))
        fetcher = Fetcher(self.store, self.metrics, keys, size, origin, self.links, self._block_seconds)
        sink = BlockSink(self.publisher, message.cache_root, keys, size, origin, self._block_seconds)
        marks = [Mark(wish.ttl_s, wish.blocks or None) for wish in message.retain]
        retainer = Retainer(self.store, self.metrics, marks, message.namespace)
        return Work(fetcher, (len(tokens) - 1) // size, sink, retainer)

    def _block_seconds(self, first_token: int) -> float:
        """To compute the block that begins with this token; 0 while no rate is known."""
        rate = self.engine.stats().prefill_tokens_per_s
        if rate <= 0:
            return 0.0
        cost = PrefillCost.of_model(self.engine.checkpoint.config.hidden_size, rate)
        return cost.seconds(first_token, self.engine.spec.block_size)

    async def generate(self, request: Request, work: Work, source: KvSource | None = None) -> AsyncIterator[Update]:
        """The engine's updates; its errors become those of the mesh. `source` defaults to the stored prefix."""
        self.changed.set()
        work.retainer.begin(work.fetcher.keys)
        origin = source or StoredPrefix(work.fetcher, work.fetchable, work.sink.loaded)
        try:
            async with aclosing(self.engine.generate(request, source=origin, sink=work.sink)) as updates:
                async for update in updates:
                    yield update
        except RequestRefused as error:
            raise InvalidRequest(str(error), field="prompt") from error
        except EngineBusy as error:
            raise Overloaded(str(error), retry_after=1.0) from error
        except EngineClosed as error:
            raise Unavailable(str(error)) from error
        except EngineError as error:
            raise Internal("the model step failed") from error
        finally:
            self.changed.set()
            await work.retainer.close()

    def load(self) -> router_pb2.Load:
        """What the router should know now."""
        stats = self.engine.stats()
        return router_pb2.Load(
            running=stats.running,
            waiting=stats.waiting,
            queued_prefill_tokens=stats.queued_tokens,
            free_kv_tokens=stats.free_pages * self.engine.spec.block_size,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            decode_step_s=stats.decode_step_s,
            fetch_bytes_per_s=self.links.near.rate,
            remote_bytes_per_s=self.links.far.rate,
        )


def _figures(engine: Engine) -> dict[str, float]:
    stats = engine.stats()
    return {
        WorkerMetrics.RUNNING: stats.running,
        WorkerMetrics.WAITING: stats.waiting,
        WorkerMetrics.KV_USAGE: 1 - stats.free_pages / stats.total_pages,
        WorkerMetrics.PREEMPTIONS: stats.preemptions,
        WorkerMetrics.DRAFT_FAULTS: stats.draft_failures,
    }


@dataclass(frozen=True)
class ServedWorker:
    """A worker that serves."""

    address: str
    worker: Worker

    @property
    def metrics(self) -> WorkerMetrics:
        """The worker's."""
        return self.worker.metrics


@asynccontextmanager
async def open_worker(
    config: WorkerConfig,
    role: router_pb2.Role.ValueType,
    register: Callable[[grpc.aio.Server, Worker], None],
    service: str,
    *,
    metrics: WorkerMetrics,
    drafter: Drafter | None = None,
) -> AsyncIterator[ServedWorker]:
    """Loads the model, serves, joins the router; when the block ends leaves the router first, then drains."""
    _stay(config)
    check_device(config.engine)
    device = device_of(config.engine.device)
    async with open_channels() as channels, Engine.open(config.engine, drafter=drafter) as engine:
        _say_loaded(engine)
        metrics.watch(lambda: _figures(engine))
        store_channel = channels.to(config.kvstore) if config.kvstore else None
        name = f"{service}-{os.getpid()}"
        two_steps = 2 * config.engine.max_batch_tokens // config.engine.block_size
        waiting_pages = max(engine.stats().total_pages // _PUBLISH_SHARE, two_steps)
        async with (
            open_store(
                store_channel, name, engine.spec, config.host, timeout_s=config.store_timeout_s, device=device
            ) as store,
            open_publisher(store, metrics, waiting_pages) as publisher,
        ):
            worker = Worker(config, engine, store, publisher, channels, metrics)
            async with serve(
                config.address, lambda server: register(server, worker), [service], grace=config.drain_s
            ) as server:
                address = f"{config.address.rsplit(':', 1)[0]}:{server.port}"
                async with _joined(worker, role, address, server):
                    yield ServedWorker(address, worker)


def _say_loaded(engine: Engine) -> None:
    kept = "in torch's memory" if engine.packed is None else str(engine.packed)
    _LOG.info("loaded", weights=kept, peak_mb=engine.stats().peak_bytes // 10**6)


def _stay(config: WorkerConfig) -> None:
    """Before the first thread that computes. Raises ConfigError."""
    if config.cores:
        try:
            stay_on(parse_cores(config.cores))
        except OSError as error:
            raise ConfigError("cores", config.cores, f"{error.strerror}; use cores of this host") from error


@asynccontextmanager
async def _joined(
    worker: Worker, role: router_pb2.Role.ValueType, address: str, server: RpcServer
) -> AsyncIterator[None]:
    """Serving, and in the router's rotation when a router is configured."""
    hello = router_pb2.Hello(
        member_id=uuid.uuid4().hex,
        role=role,
        address=address,
        host_id=worker.config.host,
        model_name=worker.config.served_name,
        spec=spec_to_message(worker.engine.spec),
        max_model_len=worker.engine.max_model_len,
        max_running=worker.config.engine.max_running,
        kv_capacity_tokens=worker.engine.stats().total_pages * worker.engine.spec.block_size,
    )
    await server.set_serving(True)
    if not worker.config.router:
        yield
        return
    channel = worker.channels.to(worker.config.router)
    async with asyncio.TaskGroup() as tasks:
        joined = asyncio.Event()
        stay = stay_joined(channel, hello, worker.load, changed=worker.changed, joined=joined)
        staying = tasks.create_task(stay)
        try:
            with suppress(TimeoutError):  # the router may come later
                await asyncio.wait_for(joined.wait(), _JOIN_PATIENCE_S)
            yield
        finally:
            staying.cancel()
