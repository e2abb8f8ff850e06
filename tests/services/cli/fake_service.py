"""A service as far as a supervisor can tell. `python fake_service.py NAME [BEHAVIOUR] [DIARY]`"""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial
from pathlib import Path

from penstock.rpc.server import serve
from penstock.runtime.lifecycle import Lifecycle, run
from penstock.runtime.ports import ports_are_reserved


async def live(name: str, behaviour: str, diary: Path | None, lifecycle: Lifecycle) -> None:
    if behaviour == "broken":
        print('{"event": "no such model", "level": "error", "model": "x"}', file=sys.stderr)
        sys.exit(3)
    if behaviour == "slow":
        print("thinking", file=sys.stderr, flush=True)
        await asyncio.Event().wait()
    if behaviour == "chatty":
        print("x" * 100_000, file=sys.stderr, flush=True)
        print('{"event": "mind the gap", "level": "warning"}', file=sys.stderr, flush=True)
    if behaviour.startswith("gateway:"):
        await answer_readyz(int(behaviour.partition(":")[2]))
    if behaviour in ("grpc", "stuck", "unavailable"):
        async with serve("127.0.0.1:0", lambda server: None, []) as server:
            await server.set_serving(behaviour == "grpc")
            await server.set_live(behaviour != "stuck")
            lifecycle.ready(address=f"127.0.0.1:{server.port}")
            await lifecycle.stopped()
        return
    lifecycle.ready(address="127.0.0.1:1", name=name)
    if behaviour == "hung":
        time.sleep(60)  # noqa: ASYNC251  the point: its event loop is blocked
    await lifecycle.stopped()
    if diary is not None:
        with diary.open("a") as pages:
            pages.write(f"{name}\n")


async def answer_readyz(port: int) -> None:
    """HTTP of a few lines: not ready twice, then ready."""
    statuses = iter(["503 Not Yet", "503 Not Yet"])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {next(statuses, '200 OK')}\r\nConnection: close\r\n\r\n".encode())
        writer.close()

    await asyncio.start_server(answer, "127.0.0.1", port, reuse_port=ports_are_reserved())


if __name__ == "__main__":
    arguments = [*sys.argv[1:], "", ""]
    run(partial(live, arguments[0], arguments[1], Path(arguments[2]) if arguments[2] else None), orphan_grace_s=0.5)
