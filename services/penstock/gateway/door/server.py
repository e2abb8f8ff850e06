"""uvicorn inside the gateway's loop: it fails loudly before it listens, and drains when its block ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from penstock.gateway.door.protocol import BoundedProtocol, Sparse
from penstock.runtime.addresses import HostPort
from penstock.runtime.config import ConfigError
from penstock.runtime.ports import ports_are_reserved
from penstock.runtime.tasks import Failed, beside

_BACKLOG = 1024
_LAST_GRACE_S = 1
_KEEP_ALIVE_S = 75
"""Longer than clients and proxies keep an idle connection, so that they close it first."""


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the process and sets an event when it has started."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Sets `accepting` when requests are accepted."""
        await super().startup(sockets)
        self.accepting.set()


@asynccontextmanager
async def serve_http(
    app: ASGIApp, address: HostPort, *, failed: Failed, tls: ssl.SSLContext | None = None
) -> AsyncIterator[HostPort]:
    """Serves `app` for the length of the block, with `tls` as HTTPS; gives the address with its port.

    Raises ConfigError when the process cannot listen there, and any error that ends uvicorn within the block. Leaving
    the block stops accepting and closes connections; requests that run have a second before they are cancelled.
    """
    listener = _listen(address)
    settings = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LAST_GRACE_S,
        backlog=_BACKLOG,
        ssl_context_factory=(lambda _config, _default: tls) if tls else None,
    )
    server = _Server(settings)

    async def run() -> None:
        try:
            await server.serve([listener])
        except Exception:
            if server.started:  # uvicorn leaves its sockets open then
                await server.shutdown([listener])
            raise
        if not server.should_exit:
            raise RuntimeError("the HTTP server ended by itself")

    with listener, _few_lines():
        async with beside(run, name="http", on_failure="stop", failed=failed) as serving:
            await server.accepting.wait()
            try:
                yield address.at(listener.getsockname()[1])
            finally:
                server.should_exit = True
                await serving.ended()


@contextmanager
def _few_lines() -> Iterator[None]:
    """uvicorn writes a line for each request that is not HTTP; of many alike only some are kept."""
    logger, sparse = logging.getLogger("uvicorn.error"), Sparse(asyncio.get_running_loop())
    logger.addFilter(sparse)
    try:
        yield
    finally:
        logger.removeFilter(sparse)


def _listen(address: HostPort) -> socket.socket:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        # With its protocol: asyncio turns off Nagle's algorithm, which holds a stream's events back, only where the
        # socket says that it is TCP.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(ports_are_reserved()))
            listener.bind(target)
            listener.listen(_BACKLOG)  # here and not only in uvicorn: two may bind to a port, one may listen
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError("http_address", address, f"cannot listen there: {error}") from None
    return listener
