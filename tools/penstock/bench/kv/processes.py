"""The processes that the bench talks to."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from penstock.cli.child import ChildSpec, Values, running

HOST = "bench-host"
_READY_S = 60.0


@asynccontextmanager
async def started(module: str, *arguments: str) -> AsyncIterator[tuple[int, Values]]:
    """Runs `python -m module` for the length of the block; gives its pid and its first line."""
    ready: asyncio.Future[Values] = asyncio.get_running_loop().create_future()
    spec = ChildSpec(module, (sys.executable, "-m", module, *arguments))
    async with running(spec, ready.set_result, lambda _name, _line: None) as child:
        ended = asyncio.ensure_future(child.ended())
        waiting: list[asyncio.Future[Any]] = [ready, ended]
        await asyncio.wait(waiting, timeout=_READY_S, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not ready.done():
            raise RuntimeError(f"{module} did not start: {' | '.join(child.tail[-3:])}")
        yield child.pid, ready.result()


@asynccontextmanager
async def store_process(host_bytes: int, *arguments: str) -> AsyncIterator[tuple[int, str]]:
    """A store in a process of its own: pid and address."""
    command = ("--address", "127.0.0.1:0", "--host-bytes", str(host_bytes), "--host-id", HOST, "--log-level", "error")
    async with started("penstock.kvstore", *command, *arguments) as (pid, values):
        yield pid, str(values["address"])


def private_bytes(pid: int) -> int:
    """Bytes of memory that the process shares with no other."""
    with open(f"/proc/{pid}/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
