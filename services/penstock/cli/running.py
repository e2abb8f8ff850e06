"""A whole mesh for the length of a block: started, watched, and gone afterwards."""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

from penstock.cli.mesh import MeshOptions, MeshPlan, plan_mesh
from penstock.cli.ports import reserved_ports
from penstock.cli.redis_server import own_redis
from penstock.cli.supervisor import Patience, supervised
from penstock.cli.view import View

_PROBE_S = 0.03
_PROBE_PATIENCE_S = 2.0
_STOP_S = 10.0
"""Seconds to stop beyond the drain: errors have to reach their clients, and files the disk."""
_INTERRUPTED = 130
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@asynccontextmanager
async def running_mesh(options: MeshOptions, view: View) -> AsyncIterator[MeshPlan]:
    """The mesh's plan, with its addresses, once a request would succeed. Raises ConfigError or ChildFailed.

    SIGINT, SIGTERM and SIGHUP cancel the calling task, and with it the block; a second one ends the services at once.
    """
    patience = Patience(stop_s=options.drain_s + _STOP_S, hung_s=options.hung_s, stuck_s=options.stuck_s)
    async with AsyncExitStack() as stack:
        ports = stack.enter_context(reserved_ports())
        if options.redis:  # before those that need it, and after them
            redis = await stack.enter_async_context(own_redis(view, patience))
            plan = plan_mesh(options, ports, redis=redis)
        else:
            plan = plan_mesh(options, ports)
        view.note(plan.note)
        async with supervised(plan.children, view.change, view.line, patience) as supervisor:
            with _cancelled_by_signals(view.interrupted, supervisor.kill):
                await supervisor.ready()
                for url in (plan.url, *plan.others):
                    await serving(url)
                yield plan
                view.stopping()
                await supervisor.stop()


def run_until_signalled(main: Callable[[], Any]) -> int:
    """Runs the coroutine function to its end; its exit code, or 130 when a signal ended it, as shells have it."""

    async def body() -> int:
        try:
            return int(await main() or 0)
        except asyncio.CancelledError:
            return _INTERRUPTED

    return asyncio.run(body())


async def serving(url: str) -> None:
    """Returns when the gateway says that a request would succeed."""
    parts = urlsplit(url)
    tls = None
    if parts.scheme == "https":  # it is our own process: who signed its certificate does not matter
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    while True:
        if await _says_ready(parts.hostname or "", parts.port or 0, tls):
            return
        await asyncio.sleep(_PROBE_S)


async def _says_ready(host: str, port: int, tls: ssl.SSLContext | None) -> bool:
    try:
        async with asyncio.timeout(_PROBE_PATIENCE_S):
            return await _probe(host, port, tls)
    except OSError:  # a TimeoutError is one
        return False


async def _probe(host: str, port: int, tls: ssl.SSLContext | None) -> bool:
    reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    try:
        writer.write(f"GET /readyz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return b" 200 " in await reader.readline()
    finally:
        writer.close()


@contextmanager
def _cancelled_by_signals(first: Callable[[], None], second: Callable[[], None]) -> Iterator[None]:
    """Handlers stay in place until the loop ends: the second signal comes while the block is being left."""
    task = asyncio.current_task()
    assert task is not None
    asked = False

    def signalled() -> None:
        nonlocal asked
        if asked:
            second()
            return
        asked = True
        first()
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, signalled)
    yield
