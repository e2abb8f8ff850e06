"""The life of a process: start, tell who waits that it is ready, serve until told to stop, stop in order.

A supervisor hands its child one end of a socket pair in `PENSTOCK_SUPERVISOR_FD`. The child writes one JSON
line when it is ready, such as `{"address": "127.0.0.1:41234"}`. When the supervisor ends, however it ends,
the child reads end-of-file there and stops.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
import uvloop

SUPERVISOR_FD = "PENSTOCK_SUPERVISOR_FD"
_GRACE_S = 10.0


class Lifecycle:
    """Given to a service's main coroutine: report readiness once, then wait for the end."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        fd = os.environ.pop(SUPERVISOR_FD, None)
        self._supervisor = socket.socket(fileno=int(fd)) if fd else None

    def ready(self, **values: object) -> None:
        """Tells the supervisor, and the log, that the service works, and where."""
        structlog.get_logger("penstock").info("ready", **values)
        if self._supervisor is not None:
            self._supervisor.sendall(json.dumps(values).encode() + b"\n")

    async def stopped(self) -> None:
        """Returns when the process was asked to stop."""
        await self._stop.wait()

    def stop(self) -> None:
        """Asks the process to stop."""
        self._stop.set()

    async def watch(self) -> None:
        """Sets the stop flag on SIGINT, SIGTERM and the supervisor's end; a second signal ends the process at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        if self._supervisor is not None:
            self._supervisor.setblocking(False)
            while await loop.sock_recv(self._supervisor, 256):
                pass
            self.stop()
            await asyncio.sleep(_GRACE_S)
            os._exit(1)

    def _signalled(self, number: int) -> None:
        if self._stop.is_set():
            os._exit(128 + number)
        self.stop()


def run(main: Callable[[Lifecycle], Coroutine[Any, Any, None]]) -> None:
    """Runs `main` on uvloop until it returns."""

    async def body() -> None:
        lifecycle = Lifecycle()
        watcher = asyncio.get_running_loop().create_task(lifecycle.watch())  # its parent is this function
        try:
            await main(lifecycle)
        finally:
            watcher.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())
