"""Real Redis servers for tests, on a free port of 127.0.0.1 or a Unix socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

RedisKind = Literal["port", "unix", "cluster", "sentinel"]


@dataclass(frozen=True)
class RedisServer:
    """A running server."""

    url: str
    """As settings take it."""
    plain: str
    """Of the one server itself."""
    process: asyncio.subprocess.Process

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.process.pid

    async def kill(self) -> None:
        """Ends it; when this returns, nobody is connected to it any more."""
        self.process.kill()
        await self.process.wait()


def free_port(least: int = 0) -> int:
    """A port of 127.0.0.1 that nobody uses, below 50000 so that a cluster's second port is one too."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if least <= port < 50_000:
            return port


@asynccontextmanager
async def redis_server(directory: Path, kind: RedisKind = "port", *, port: int = 0) -> AsyncIterator[RedisServer]:
    """A server with nothing in it, for the length of the block. cluster: one that has all slots and refuses what would
    touch several. sentinel: one behind a sentinel."""
    port = port or free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    plain = url = f"redis://127.0.0.1:{port}/0"
    if kind == "unix":
        options = ["--port", "0", "--unixsocket", str(directory / "redis.sock"), "--save", ""]
        plain = url = f"unix://{directory}/redis.sock"
    elif kind == "cluster":
        options += ["--cluster-enabled", "yes", "--cluster-config-file", f"nodes-{port}.conf"]
        url = f"redis+cluster://127.0.0.1:{port}"
    async with AsyncExitStack() as stack:
        process = await stack.enter_async_context(_process(directory, options))
        await _answers(plain)
        if kind == "cluster":
            await _command(plain, "CLUSTER", "ADDSLOTSRANGE", "0", "16383")
            await _until(plain, b"cluster_state:ok", "CLUSTER", "INFO")
        elif kind == "sentinel":
            second = free_port()
            conf = directory / f"sentinel-{second}.conf"
            conf.write_text(f"port {second}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {port} 1\n")
            await stack.enter_async_context(_process(directory, [str(conf), "--sentinel"], name=[]))
            await _until(f"redis://127.0.0.1:{second}", b"status=ok", "INFO", "sentinel")
            url = f"redis+sentinel://127.0.0.1:{second}/main/0"
        yield RedisServer(url, plain, process)


@asynccontextmanager
async def _process(
    directory: Path, options: list[str], name: list[str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    more = ["--dir", str(directory)] if name is None else name
    process = await asyncio.create_subprocess_exec(
        "redis-server", *options, *more, stdout=asyncio.subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"}
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _answers(url: str) -> None:
    await _until(url, b"PONG", "PING")


async def _until(url: str, wanted: bytes, *command: str) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                if wanted in await _command(url, *command):
                    return
            except OSError:
                pass
            await asyncio.sleep(0.01)


async def _command(url: str, *command: str) -> bytes:
    """The raw answer to one command, as far as it comes in one piece."""
    if url.startswith("unix://"):
        reader, writer = await asyncio.open_unix_connection(url.removeprefix("unix://"))
    else:
        host, _, port = url.removeprefix("redis://").partition("/")[0].partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write((" ".join(command) + "\r\n").encode())
        return await reader.read(1 << 16)
    finally:
        writer.close()
