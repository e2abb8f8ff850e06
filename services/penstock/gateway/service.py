"""Wires the gateway: the model's text side, the view of the mesh, and the two doors in one event loop."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc
import uvicorn
from starlette.applications import Starlette

from penstock.chat.model import ChatModelError, load_chat_model
from penstock.gateway.admission import Admission
from penstock.gateway.auth import load_auth
from penstock.gateway.completion import Completer
from penstock.gateway.config import GatewayConfig
from penstock.gateway.http import application
from penstock.gateway.mesh import Mesh, open_mesh
from penstock.gateway.protocol import BoundedProtocol
from penstock.gateway.rpc import SERVICE, GatewayService
from penstock.rpc.channels import open_channels
from penstock.rpc.server import RpcServer, serve
from penstock.runtime.config import ConfigError
from penstock.runtime.metrics import GatewayMetrics
from penstock.v1 import gateway_pb2_grpc

_BACKLOG = 1024
_KEEP_ALIVE_S = 75
"""Longer than clients and proxies keep an idle connection, so that it is they who close it."""
_MOST_STREAMS = 64
"""gRPC calls that one connection of a client may have open; more wait at the client."""


@dataclass(frozen=True)
class Gateway:
    """A gateway that serves."""

    address: str
    """HTTP, host:port."""
    grpc_address: str
    completer: Completer
    admission: Admission

    @property
    def metrics(self) -> GatewayMetrics:
        """What GET /metrics tells."""
        return self.completer.metrics

    @property
    def mesh(self) -> Mesh:
        """Its view of the mesh."""
        return self.completer.mesh

    async def ready(self) -> None:
        """Returns when a request would succeed."""
        await self.mesh.until(True)


@asynccontextmanager
async def open_gateway(config: GatewayConfig) -> AsyncIterator[Gateway]:
    """Serves both doors until the block ends, then drains. Raises ConfigError."""
    try:
        model = load_chat_model(config.model_dir)
    except ChatModelError as error:
        raise ConfigError("model_dir", str(config.model_dir), str(error)) from None
    auth = load_auth(config)
    metrics = GatewayMetrics()
    admission = Admission(config.max_live_requests, metrics)
    started = int(time.time())
    async with open_channels() as channels:
        async with open_mesh(channels, config.router, config.served_name, model.fingerprint) as mesh:
            with _threads() as pool:
                completer = Completer(config, model, mesh, auth, channels, pool, metrics)
                service = GatewayService(completer, admission, started)

                def register(server: grpc.aio.Server) -> None:
                    gateway_pb2_grpc.add_GatewayServicer_to_server(service, server)

                host, _, _ = config.grpc_address.rpartition(":")
                # The doors close in this order: HTTP drains, then gRPC, then the view of the mesh ends.
                async with serve(
                    config.grpc_address,
                    register,
                    [SERVICE],
                    max_calls=config.max_live_requests + 64,
                    max_streams=_MOST_STREAMS,
                    grace=config.drain_s,
                ) as rpc:
                    app = application(completer, admission, started)
                    async with _http(config, app) as address, _health(mesh, rpc):
                        yield Gateway(address, f"{host}:{rpc.port}", completer, admission)


@asynccontextmanager
async def _health(mesh: Mesh, rpc: RpcServer) -> AsyncIterator[None]:
    """gRPC's health answers what /readyz does."""

    async def follow() -> None:
        ready = mesh.ready
        while True:
            await rpc.set_serving(ready)
            ready = not ready
            await mesh.until(ready)

    task = asyncio.get_running_loop().create_task(follow())  # its parent is this function
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="prepare")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _Server(uvicorn.Server):
    """uvicorn inside somebody else's loop: signals are not its business, and its start is an event."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.bound = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Tells who waits that requests are accepted."""
        await super().startup(sockets)
        self.bound.set()


@asynccontextmanager
async def _http(config: GatewayConfig, app: Starlette) -> AsyncIterator[str]:
    """Serves `app` for the length of the block; gives the address. Leaving stops accepting, drains, then cancels."""
    listener = _listen(config.http_address)
    settings = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(config.drain_s)),
        backlog=_BACKLOG,
    )
    server = _Server(settings)
    task = asyncio.get_running_loop().create_task(server.serve([listener]))  # its parent is this function
    try:
        await server.bound.wait()
        host, _, _ = config.http_address.rpartition(":")
        yield f"{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
    except (OSError, ValueError) as error:
        raise ConfigError("http_address", address, f"can't be listened on: {error}") from None
    listener.setblocking(False)
    return listener
