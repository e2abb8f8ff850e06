"""The processes that the bench talks to."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress

from penstock.cli.child import ChildSpec, Values, running
from penstock.runtime.tasks import first_of

HOST = "bench-host"
_READY_S = 60.0


@asynccontextmanager
async def started(module: str, *arguments: str) -> AsyncIterator[tuple[int, Values]]:
    """Runs `python -m module` for the length of the block; gives its pid and its first line.

    Raises RuntimeError when it ends, or says nothing, before it is ready.
    """
    ready: asyncio.Future[Values] = asyncio.get_running_loop().create_future()
    spec = ChildSpec(module, (sys.executable, "-m", module, *arguments))
    async with running(spec, ready.set_result, lambda _name, _line: None) as child:
        with suppress(TimeoutError):
            async with asyncio.timeout(_READY_S):
                await first_of(_done(ready), _done(child.ended()))
        if ready.done() and not ready.cancelled():
            yield child.pid, ready.result()
            return
    raise RuntimeError(f"{module} did not start: {' | '.join(child.tail)}")  # here, where no group wraps it


@asynccontextmanager
async def store_process(host_bytes: int, *arguments: str) -> AsyncIterator[tuple[int, str]]:
    """A store in a process of its own: pid and address."""
    command = ("--address", "127.0.0.1:0", "--host-bytes", str(host_bytes), "--host-id", HOST, "--log-level", "error")
    async with started("penstock.kvstore", *command, *arguments) as (pid, values):
        yield pid, str(values["address"])


async def _done(waited: Awaitable[object]) -> None:
    await waited


def private_bytes(pid: int) -> int:
    """Bytes of memory that the process shares with no other."""
    with open(f"/proc/{pid}/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
