"""A server that runs: its processes, and where it is asked."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from penstock.bench.e2e import processes
from penstock.bench.e2e.servers import ServerSpec
from penstock.bench.engine.process import Failed
from penstock.load.asking import TokenClient
from penstock.load.target import LoadTarget

_ROOT = Path(__file__).parents[4]
_READY_S = 900.0
_PROBE_S = 0.1
_FAREWELL_S = 30.0


@dataclass(slots=True)
class Server:
    """Made by `serving`."""

    spec: ServerSpec
    target: LoadTarget
    port: int
    pid: int
    ready_s: float
    """From its start until a request would succeed."""

    @property
    def client(self) -> TokenClient:
        """Asks it."""
        return TokenClient(self.target)

    @property
    def pids(self) -> list[int]:
        """All its processes."""
        return processes.tree(self.pid)

    def pause(self) -> None:
        """Stops its processes, if it bears that."""
        if self.spec.paused:
            processes.send(self.pids, signal.SIGSTOP)

    def go_on(self) -> None:
        """Ends the pause."""
        if self.spec.paused:
            processes.send(self.pids, signal.SIGCONT)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])


@asynccontextmanager
async def serving(spec: ServerSpec, port: int) -> AsyncIterator[Server]:
    """The server for the length of the block. Raises Failed when it does not become ready."""
    begin = asyncio.get_running_loop().time()
    with tempfile.TemporaryFile() as log:
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                cwd=_ROOT,
                env={**os.environ, **spec.environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise Failed(f"{spec.command[0]} can't be started: {error.strerror}") from None
        try:
            await _ready(spec, port, process, log)
            ready_s = asyncio.get_running_loop().time() - begin
            yield Server(spec, spec.target(port), port, process.pid, ready_s)
        finally:
            await end(process)


async def end(process: asyncio.subprocess.Process) -> None:
    """Ends a server with SIGTERM, or, where that takes too long, with SIGKILL; waits for all its processes."""
    pids = processes.tree(process.pid)
    processes.send(pids, signal.SIGCONT)
    processes.send([process.pid], signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(_FAREWELL_S):
            await process.wait()
    processes.send(pids, signal.SIGKILL)
    with suppress(ProcessLookupError):  # of a server that had ended by itself, what it started may be left
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def _ready(spec: ServerSpec, port: int, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
    try:
        async with asyncio.timeout(_READY_S):
            while not await _answers(port, spec.ready_path):
                if process.returncode is not None:
                    raise Failed(f"ended with {process.returncode} before it was ready: {_last_words(log)}")
                await asyncio.sleep(_PROBE_S)
    except TimeoutError:
        raise Failed(f"not ready after {_READY_S:.0f} s: {_last_words(log)}") from None


async def _answers(port: int, path: str) -> bool:
    """Whether a GET gives 200."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()


def _last_words(log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-600:] or "it said nothing"
