"""Wires the gateway: the text side of its models, the view of the mesh, and the two doors in one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import grpc

from penstock.chat.model import tokenizer_path
from penstock.chat.rendering.processes import rendering_apart
from penstock.chat.sessions import Sessions
from penstock.gateway.accounts.admission import Admission
from penstock.gateway.accounts.auth import load_auth
from penstock.gateway.accounts.ledger import open_ledger
from penstock.gateway.accounts.limiter import Limiter
from penstock.gateway.accounts.pot import TenantPot
from penstock.gateway.accounts.sharing import sharing
from penstock.gateway.accounts.terms import read_terms
from penstock.gateway.api.responses.opening import open_responses
from penstock.gateway.batches.opening import open_batches
from penstock.gateway.completing.completer import Completer, SharedParts
from penstock.gateway.completing.models import Models
from penstock.gateway.completing.past import PastRequests
from penstock.gateway.completing.sources import read_models
from penstock.gateway.completing.stored_answers import open_answer_store
from penstock.gateway.completing.threads import open_threads
from penstock.gateway.config import GatewayConfig
from penstock.gateway.door.answering import LineDoor
from penstock.gateway.door.drain import Drain
from penstock.gateway.door.http import application
from penstock.gateway.door.reception import Reception
from penstock.gateway.door.refusals import Refusals
from penstock.gateway.door.rpc import GatewayService
from penstock.gateway.door.rpc_entrance import SERVICE, RpcEntrance
from penstock.gateway.door.server import serve_http
from penstock.gateway.door.tls import Certificate
from penstock.gateway.mesh.sites import Sites
from penstock.gateway.mesh.view import RouterView, open_view
from penstock.gateway.mesh.workers import open_worker_channels
from penstock.grammar.compiling import open_compiler
from penstock.rpc.channels import open_channels
from penstock.rpc.checkup import WIRE, own_version
from penstock.rpc.identity import MemberIdentity
from penstock.rpc.server import RpcServer, serve
from penstock.runtime.addresses import HostPort
from penstock.runtime.findings import Finding
from penstock.runtime.metrics import GatewayMetrics
from penstock.runtime.redis_client import REDIS_SCHEMES, redis_found
from penstock.runtime.tasks import Failed, beside
from penstock.v1 import gateway_pb2_grpc, router_pb2

_LAST_GRACE_S = 0.5
"""For what is left of a call when the drain is over."""
_FIRST_S = 10.0
"""Seconds that a gRPC call of a client has to send its request."""
STALL_S = 60.0
"""Seconds in which such a client has to take a message of its answer, when what waits is more than fits in buffers; as
over HTTP (`door.protocol`)."""
_MOST_STREAMS = 64
"""gRPC calls that one connection of a client may have open; more wait at the client."""


@dataclass(frozen=True)
class Gateway:
    """A running gateway."""

    address: HostPort
    """Where HTTP listens."""
    grpc_address: HostPort
    reception: Reception

    @property
    def metrics(self) -> GatewayMetrics:
        """The counters behind GET /metrics."""
        return self.reception.metrics

    @property
    def view(self) -> RouterView:
        """The gateway's view of the mesh."""
        return self.reception.view

    async def ready(self) -> None:
        """Returns when a request for one of the models would succeed."""
        await self.view.until(True)


@asynccontextmanager
async def open_gateway(config: GatewayConfig) -> AsyncIterator[Gateway]:
    """Serves both doors until the block ends, then drains. Raises ConfigError."""
    sources = read_models(config)
    auth = load_auth(config)
    tls = Certificate(config.tls_cert, config.tls_key) if config.tls_cert and config.tls_key else None
    terms = read_terms(config.terms)
    metrics = GatewayMetrics()
    failed = metrics.task_failed
    started = int(time.time())
    tokenizers = {source.name: source.model.fingerprint for source in sources}
    own: asyncio.Future[router_pb2.MeshWatcher] = asyncio.get_running_loop().create_future()
    async with (
        open_ledger(config.ledger, terms, failed) as ledger,
        open_responses(config) as responses,
        open_batches(config, metrics) as batches,
        open_answer_store(config.answer_store, failed) as answers,
        open_channels(MemberIdentity.of(config.member_tls, "gateway")) as channels,
        open_worker_channels(channels, failed) as workers,
        open_view(channels, config.sites, tokenizers=tokenizers, own=own, failed=failed) as view,
        AsyncExitStack() as stack,
    ):
        models = [await stack.enter_async_context(rendering_apart(source.model)) for source in sources]
        open_ready = partial(open_compiler, failed=failed, at_hand=bool(config.answer_store))
        compilers = [await stack.enter_async_context(open_ready(tokenizer_path(source.dir))) for source in sources]
        with open_threads() as threads:
            limiter = Limiter(terms, ledger.spent_today)
            several = auth.ring is not None
            places = TenantPot(config.max_live_requests, several=several, weight=limiter.weight)
            admission = Admission(places, metrics)
            await stack.enter_async_context(sharing(limiter, ledger, failed))
            sites = Sites(channels, view, spill_s=config.spill_s, spilled=metrics.spill)
            shared = SharedParts(
                auth=auth,
                ledger=ledger,
                limiter=limiter,
                view=view,
                sites=sites,
                workers=workers,
                threads=threads,
                sessions=Sessions(config.max_sessions, config.max_session_tokens, config.max_tenant_session_tokens),
                past=PastRequests(config.max_past_requests, config.max_past_bytes),
                answers=answers,
                pixels=TenantPot(config.max_picture_bytes, several=several, weight=limiter.weight),
                metrics=metrics,
            )
            served = Models(
                [
                    Completer(config, model, name=source.name, compiler=compiler, shared=shared)
                    for source, model, compiler in zip(sources, models, compilers, strict=True)
                ]
            )
            reception = Reception(
                config=config,
                auth=auth,
                admission=admission,
                ledger=ledger,
                limiter=limiter,
                threads=threads,
                models=served,
                past=shared.past,
                refusals=Refusals(metrics, min(config.max_past_requests, 256)),
                view=view,
                sites=sites,
                metrics=metrics,
                drain=Drain(served),
                responses=responses,
                batches=batches.desk if batches else None,
                started=started,
            )
            service = GatewayService(reception)

            def register(server: grpc.aio.Server) -> None:
                gateway_pb2_grpc.add_GatewayServicer_to_server(service, server)

            # The end: both doors drain together, then HTTP closes, then gRPC, then the view of the mesh.
            async with serve(
                config.grpc_address,
                register,
                [SERVICE],
                entrance=RpcEntrance(reception),
                max_calls=config.max_live_requests + 64,
                max_streams=_MOST_STREAMS,
                first_s=_FIRST_S,
                stall_s=STALL_S,
                reflects=config.reflection,
                grace=_LAST_GRACE_S,
                credentials=tls.for_grpc() if tls else None,
                examine=partial(_examined, config),
            ) as rpc:
                app = application(reception)
                async with serve_http(
                    app, config.http_address, failed=failed, tls=tls.context if tls else None
                ) as address:
                    own.set_result(_introduction(config, rpc, address, tls=tls is not None))
                    try:
                        async with AsyncExitStack() as stack:
                            await stack.enter_async_context(_health(view, rpc, failed))
                            await stack.enter_async_context(auth.followed(failed))
                            if tls:
                                await stack.enter_async_context(tls.followed(failed))
                            if batches:  # ends before the drain: others go on with what has no result yet
                                await stack.enter_async_context(batches.running(LineDoor(reception), threads))
                            yield Gateway(address, config.grpc_address.at(rpc.port), reception)
                    finally:
                        await rpc.set_serving(False)
                        await reception.drain.close(config.drain_s)


def _introduction(config: GatewayConfig, rpc: RpcServer, http: HostPort, *, tls: bool) -> router_pb2.MeshWatcher:
    """Says where this gateway is."""
    grpc_address = config.grpc_address.at(rpc.port)
    return router_pb2.MeshWatcher(address=grpc_address, http_address=http, tls=tls, version=own_version(), wire=WIRE)


async def _examined(config: GatewayConfig) -> Sequence[Finding]:
    """What `penstock ctl doctor` asks of a gateway: whether the Redis that its settings name answers."""
    settings = {name: getattr(config, name) for name in ("ledger", "responses_store", "answer_store", "batch_store")}
    return [await redis_found(name, url) for name, url in settings.items() if url.startswith(REDIS_SCHEMES)]


@asynccontextmanager
async def _health(view: RouterView, rpc: RpcServer, failed: Failed) -> AsyncIterator[None]:
    """Keeps the gRPC health service in agreement with /readyz for the length of the block."""

    async def follow() -> None:
        ready = view.ready
        while True:
            await rpc.set_serving(ready)
            ready = not ready
            await view.until(ready)

    async with beside(follow, name="health", on_failure="restart", failed=failed):
        yield
