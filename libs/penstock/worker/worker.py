"""A worker: one engine, and the store it reads and feeds."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from math import inf

import structlog

from penstock.engine.engine import Engine
from penstock.engine.errors import EngineBusy, EngineClosed, EngineError, NotFinite, RequestRefused
from penstock.engine.hooks import KvSource, Relay
from penstock.engine.request import Request, Update
from penstock.engine.stats import EngineStats
from penstock.errors import Internal, InvalidRequest, Overloaded, Unavailable
from penstock.kv.client.client import StoreClient
from penstock.kv.cost import PrefillCost
from penstock.kv.identity import Chain
from penstock.kv.pace import Pace
from penstock.kv.parts import parted
from penstock.kv.recent import RecentKeys
from penstock.kv.sealing import sealed
from penstock.kv.spec import KvSpec
from penstock.pictures.picture import spans
from penstock.rpc.capability import PlanKeys, plan_terms
from penstock.rpc.channels import Channels
from penstock.runtime.metrics import WorkerMetrics
from penstock.v1 import common_pb2
from penstock.worker.adapted_roots import AdaptedRoots
from penstock.worker.claiming import PromptClaim
from penstock.worker.config import WorkerConfig
from penstock.worker.fetching import Fetcher, StoredPrefix
from penstock.worker.order import Order
from penstock.worker.pictures import HeldPictures
from penstock.worker.progress import IdleWatch
from penstock.worker.publishing import BlockPublisher, BlockSink
from penstock.worker.rates import FetchRates
from penstock.worker.resident import ResidentBlocks
from penstock.worker.retaining import Retainer
from penstock.worker.spans import stage_spans

_LOG = structlog.get_logger("penstock.worker")
_FIRST_RATE = 500.0
"""Tokens per second of prompts that a worker believes in before it has computed one."""


@dataclass
class Work:
    """The source and the sink of one request's KV."""

    chain: Chain
    fetcher: Fetcher
    fetchable: int
    """Leading blocks without the last given token, which has to be computed for its logits."""
    sink: BlockSink
    retainer: Retainer
    claim: PromptClaim

    def used(self, update: Update) -> Counter[str]:
        """Given tokens whose KV was not computed for this request, by tier: fetched, or in the engine's pages."""
        used = self.fetcher.used(update.cached_tokens)
        used["worker"] += update.shared_tokens
        return used


def stored_spec(config: WorkerConfig, engine: Engine) -> KvSpec:
    """Of the blocks that the worker stores, which name its KV to the mesh."""
    if config.seal:
        return sealed(engine.spec, engine.parts)
    return engine.spec if engine.parts is None else parted(engine.spec)


class Worker:
    """The engine and everything else that its servicer needs; made by `open_worker`."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        *,
        store: StoreClient,
        publisher: BlockPublisher,
        channels: Channels,
        metrics: WorkerMetrics,
    ) -> None:
        self.config = config
        self.engine = engine
        self.spec = stored_spec(config, engine)
        self.store = store
        self.publisher = publisher
        self.channels = channels
        self.metrics = metrics
        self._keys = RecentKeys(engine.spec.block_size)
        self.rates = FetchRates()
        self.handoffs = FetchRates()
        """Of prompts that others have computed: from the first token there until all of their KV is in pages here. Most
        of it comes before, so that is not what a fetch of as much takes."""
        self.resident = ResidentBlocks(engine.pool)
        self.changed = asyncio.Event()
        """Set when the load has changed."""
        self.plan_keys = PlanKeys()
        """Of its routers: with any, it does what they have planned and nothing else."""
        self.adapted_roots = AdaptedRoots()
        self.pictures = HeldPictures(config.picture_bytes)
        """Those that gateways show it."""
        self._idle = IdleWatch()

    def stats(self) -> EngineStats:
        """Those of the engine, as `IdleWatch` sees them."""
        return self._idle.seen(self.engine.stats(), time.monotonic())

    def check_planned(self, request: common_pb2.Request, capability: common_pb2.Capability) -> None:
        """Raises Unavailable unless a router of this worker has planned this, and that lately; once for each plan."""
        if self.config.router and not self.plan_keys.prove(plan_terms(request, capability), capability.mac):
            self.metrics.unproven.inc()
            what = "no router of this worker has planned this, or not lately, or it was here before"
            _LOG.warning(what, request=request.request_id)
            raise Unavailable(what, code="not_planned")

    def work(self, order: Order, *, hands_on: bool = False) -> Work:
        """The hooks of one request; with `hands_on` another worker will fetch its blocks from the store."""
        tokens, size = order.tokens, self.engine.spec.block_size
        if order.request.adapter:
            self.adapted_roots.used(order.cache_root, order.origin.namespace)
        shown = spans(order.request.pictures)  # what is known of tokens alone says nothing of them
        known = () if shown else self._keys.of(order.cache_root, tokens)
        chain = Chain(order.cache_root, size, tokens, known, pictures=shown)
        fetcher = Fetcher(
            store=self.store,
            metrics=self.metrics,
            keys=list(chain.keys),
            known=self.publisher.known,
            block_size=size,
            origin=order.origin,
            rates=self.rates,
            cost=self._block_seconds,
            queue_s=self._queue_s,
            least_wait_s=self.config.fetch_wait_s,
            hands_on=hands_on,
            reach=None if self.engine.parts is None else self.engine.parts.reach,
        )
        # Who yields may take long over its prompt: nobody is to wait for it.
        least_s = inf if order.request.yields else self.config.claim_s
        claim = PromptClaim(self.store, self.metrics, self._pace, least_s=least_s, sources=order.origin.sources)
        sink = BlockSink(self.publisher, chain, origin=order.origin, cost=self._block_seconds, gave_up=claim.withdraw)
        retainer = Retainer(self.store, self.metrics, order.marks, order.origin.namespace)
        return Work(chain, fetcher, (len(tokens) - 1) // size, sink, retainer, claim)

    def _block_seconds(self, first_token: int) -> float:
        """Seconds to compute the block that begins with this token; 0 while the rate is unknown."""
        rate = self.engine.prefill_tokens_per_s
        if rate <= 0:
            return 0.0
        cost = PrefillCost.of_model(self.engine.checkpoint.config.hidden_size, rate)
        return cost.seconds(first_token, self.engine.spec.block_size)

    def _queue_s(self) -> float:
        """Seconds until a request that comes now begins to compute; 0 while the rate is unknown."""
        rate = self.engine.prefill_tokens_per_s
        return self.engine.stats().queued_tokens / rate if rate > 0 else 0.0

    def _pace(self, first_block: int) -> Pace:
        """When a request that comes now would have the blocks from `first_block` on."""
        engine, size = self.engine, self.engine.spec.block_size
        rate = engine.prefill_tokens_per_s or _FIRST_RATE
        cost = PrefillCost.of_model(engine.checkpoint.config.hidden_size, rate)
        block_s, next_s = (cost.seconds(block * size, size) for block in (first_block, first_block + 1))
        return Pace(
            queue_s=engine.stats().queued_tokens / rate,
            block_s=block_s,
            growth_s=next_s - block_s,
            step_blocks=max(1, engine.config.max_batch_tokens // size),
        )

    async def generate(
        self,
        request: Request,
        work: Work,
        source: KvSource | None = None,
        relay: Callable[[], Relay | None] = lambda: None,
        *,
        publish: bool = True,
    ) -> AsyncIterator[Update]:
        """The engine's updates; its errors become those of the mesh. `source` defaults to the stored prefix; `relay` is
        that of `Engine.generate`. Without `publish` the store gets no block of it."""
        self.changed.set()
        work.retainer.begin(work.fetcher.keys)
        sink = work.sink if publish else None
        spans = stage_spans(handoff=source is not None)
        origin = source or StoredPrefix(work.fetcher, work.fetchable, work.sink.loaded, work.claim)
        try:
            async with aclosing(self.engine.generate(request, origin, sink, relay=relay, chain=work.chain)) as updates:
                async for update in updates:
                    if spans is not None:
                        spans.tell(update, work.used(update))
                    yield update
        except RequestRefused as error:
            raise InvalidRequest(str(error), field=error.field) from error
        except EngineBusy as error:
            raise Overloaded(str(error), retry_after=1.0) from error
        except EngineClosed as error:
            raise Unavailable(str(error)) from error
        except NotFinite as error:
            work.sink.withhold()
            raise Internal(str(error)) from error
        except EngineError as error:
            raise Internal("the model step failed") from error
        finally:
            if spans is not None:
                spans.end()
            if work.sink.valid_tokens is None:  # it did not end by itself
                work.claim.withdraw()
            self.changed.set()
            await work.retainer.close()
