"""One supervised process: starts it, hears its readiness and its log, stops it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from penstock.cli.forking import NoZygote, Zygote
from penstock.runtime.lifecycle import SUPERVISOR_FD

_TAIL_LINES = 40
_LONGEST_LINE = 16 * 1024


@dataclass(frozen=True)
class ChildSpec:
    """A program to run, and when to stop it."""

    name: str
    """Unique; used in messages: prefill-0."""
    command: tuple[str, ...]
    stop_stage: int = 0
    """Lower stages are stopped first; within one stage all at once."""
    environment: Mapping[str, str] = field(default_factory=dict)
    imports: str = ""
    """What a zygote has imported that forks it; `command` is PYTHON -m MODULE ... then. Empty: nobody forks it."""

    @property
    def module(self) -> str:
        """Of one that may be forked."""
        return self.command[2]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of one that may be forked."""
        return self.command[3:]


class Process(Protocol):
    """A program that runs, however it was started."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Its exit code; negative: the signal that ended it."""
        ...

    def terminate(self) -> None:
        """Sends SIGTERM. Raises ProcessLookupError when it has ended."""
        ...


class Child:
    """A running process. Made by `running`."""

    def __init__(self, spec: ChildSpec, process: Process, tail: deque[str]) -> None:
        self.spec = spec
        self.pid = process.pid
        self._process = process
        self._tail = tail

    @property
    def tail(self) -> list[str]:
        """The last lines that it wrote."""
        return list(self._tail)

    async def ended(self) -> int:
        """Its exit code; negative: the signal that ended it."""
        return await self._process.wait()

    def ask_to_stop(self) -> None:
        """Sends SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Sends SIGKILL to it and to every process that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


Values = dict[str, object]


@asynccontextmanager
async def running(
    spec: ChildSpec,
    on_ready: Callable[[Values], None],
    on_line: Callable[[str, str], None],
    zygote: Zygote | None = None,
) -> AsyncIterator[Child]:
    """Starts `spec`; after the block the process has ended, if need be by SIGKILL.

    `on_ready` gets the child's message about itself, once; `on_line(name, line)` every line it writes. The child runs
    in a session of its own: Ctrl-C in the terminal reaches the supervisor alone, which stops the children in order.
    """
    ours, theirs = socket.socketpair()
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    lines, its_lines = os.pipe()
    with ours:
        try:
            process = await _started(spec, its_lines, theirs.fileno(), zygote, on_line)
        except BaseException:
            os.close(lines)
            raise
        finally:
            theirs.close()
            os.close(its_lines)
        child = Child(spec, process, tail)
        try:
            async with _reading(lines) as output, asyncio.TaskGroup() as tasks:
                pump = tasks.create_task(_pump(output, spec.name, tail, on_line))
                hearing = tasks.create_task(_hear_ready(ours, on_ready))
                try:
                    yield child
                finally:
                    child.kill()
                    await process.wait()
                    await asyncio.wait([pump], timeout=1.0)  # a grandchild may hold the pipe open
                    pump.cancel()
                    hearing.cancel()
        finally:
            child.kill()


async def _started(
    spec: ChildSpec, lines: int, supervisor: int, zygote: Zygote | None, on_line: Callable[[str, str], None]
) -> Process:
    """A process that writes its lines to the first descriptor and is told of the second."""
    if zygote is not None and spec.imports:
        try:
            return await zygote.fork(spec.module, spec.arguments, spec.environment, (lines, supervisor))
        except NoZygote as error:
            said = {"event": "could not be forked, and imports everything itself", "reason": str(error)}
            on_line(spec.name, json.dumps({**said, "level": "warning"}))
    return await asyncio.create_subprocess_exec(
        *spec.command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=lines,
        stderr=lines,
        pass_fds=(supervisor,),
        start_new_session=True,
        env={**os.environ, **spec.environment, SUPERVISOR_FD: str(supervisor)},
    )


@asynccontextmanager
async def _reading(pipe: int) -> AsyncIterator[asyncio.StreamReader]:
    """Reads a pipe for the length of the block, and closes it."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", 0))
    try:
        yield reader
    finally:
        transport.close()


async def _hear_ready(ours: socket.socket, on_ready: Callable[[Values], None]) -> None:
    ours.setblocking(False)
    heard = b""
    loop = asyncio.get_running_loop()
    while not heard.endswith(b"\n") and len(heard) < _LONGEST_LINE:
        try:
            more = await loop.sock_recv(ours, 4096)
        except ConnectionError:
            return
        if not more:
            return
        heard += more
    values = json.loads(heard)
    on_ready(values if isinstance(values, dict) else {})


async def _pump(output: asyncio.StreamReader, name: str, tail: deque[str], on_line: Callable[[str, str], None]) -> None:
    rest = b""
    while chunk := await output.read(_LONGEST_LINE):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            tail.append(text)
            on_line(name, text)
    if rest:
        tail.append(rest.decode(errors="replace"))
        on_line(name, tail[-1])
