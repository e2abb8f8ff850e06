"""A template that other processes render.

A template is a program: a loop in it, or messages on which a harmless one takes quadratic time, could hold a thread for
ever. Nothing stops a thread; a process can be stopped. What it renders does not hold this process's interpreter either.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec
import structlog

from penstock.chat.model import ChatModel
from penstock.chat.rendering.frames import Kind, receive, send
from penstock.chat.resuming.waypoint import Rest, Waypoint
from penstock.chat.template import ChatTemplate, Shown
from penstock.errors import InvalidRequest, Unavailable

RENDER_S = 1.0
"""Seconds of a processor for one prompt, many times what the longest takes."""
_SILENCE_S = 120.0
"""Seconds of the clock after which a process is ended that neither answers nor uses its processor."""
_MOST = 10
"""Processes; as many as there are threads that render."""
_WAYPOINT = msgspec.json.Decoder(Waypoint | None)
"""Made here, in one thread: msgspec 0.22 has crashed where two were the first to decode a type."""


_SLICE = 1 << 18
"""Bytes that are decoded in one go, and characters that are encoded."""


class RenderProcesses:
    """Renders like the `ChatTemplate` that it is made of, in another process; waits in threads. Made by
    `open_processes`."""

    def __init__(self, template: ChatTemplate, *, seconds: float = RENDER_S, most: int = _MOST) -> None:
        """`seconds` of a processor are allowed for one prompt; at most `most` processes render."""
        self.source = template.source
        self.variables = template.variables
        self._setup = json.dumps(
            {"source": template.source, "special_tokens": template.special_tokens, "seconds": seconds}
        ).encode()
        self._room = threading.BoundedSemaphore(most)
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Of the processes that are ready or render."""
        with self._lock:
            return [process.pid for process in self._all]

    def render(
        self,
        messages: Sequence[Shown],
        tools: Sequence[Shown] | None,
        *,
        generate: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises InvalidRequest as `ChatTemplate.render` does, and when the template takes too long
        or too much memory; Unavailable when the process ends for another reason."""
        rest = self.resume(messages, tools, None, generate=generate, variables=variables)
        assert rest is not None, "a whole rendering is never lost"
        return rest.text

    def resume(
        self,
        messages: Sequence[Shown | str],
        tools: Sequence[Shown] | None,
        waypoint: Waypoint | None,
        *,
        generate: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> Rest | None:
        """See `Renders.resume`; raises like `render`."""
        asked = msgspec.json.encode((_sliced(messages), _sliced(tools), waypoint, generate, variables))
        with self._room:
            process = self._take()
            try:
                kind, content = process.ask(asked)
            except (EOFError, OSError):
                self._replace(process)
            else:
                with self._lock:
                    self._idle.append(process)
                return _rest(kind, content)
        if process.out_of_time:
            raise _too_slow()
        if self._closed:
            raise _stopping()
        structlog.get_logger("penstock.chat").warning("a process that renders ended", status=process.status)
        raise Unavailable("the prompt could not be rendered; try again", code="unavailable", retry_after=1)

    def start(self) -> None:
        """Starts a process, so that the first prompt need not wait until it has."""
        process = _Process(self._setup)
        with self._lock:
            if not self._closed:
                self._all.add(process)
                self._idle.append(process)
                return
        process.end()

    def close(self) -> None:
        """Ends all processes; what still renders raises Unavailable."""
        with self._lock:
            self._closed = True
            ending, self._all, self._idle = self._all, set(), []
        for process in ending:
            process.end()

    def _take(self) -> _Process:
        while True:
            with self._lock:
                if self._closed:
                    raise _stopping()
                if self._idle:
                    return self._idle.pop()
            self.start()

    def _replace(self, process: _Process) -> None:
        process.end()
        with self._lock:
            self._all.discard(process)
            closed = self._closed
        if not closed:
            self.start()


class _Process:
    """One process, and the socket to it."""

    def __init__(self, setup: bytes) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_SILENCE_S)
        with theirs:
            # Without the working directory, which -m else puts before all modules.
            command = [sys.executable, "-P", "-m", "penstock.chat.rendering"]
            self._popen: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL
            )
        self.pid = self._popen.pid
        with suppress(OSError):  # one that has ended at once says so when it is asked
            send(self._socket, "setup", setup)

    @property
    def status(self) -> int | None:
        """How it ended."""
        return self._popen.returncode

    @property
    def out_of_time(self) -> bool:
        """Whether the kernel ended it for taking too long."""
        return self.status == -signal.SIGXCPU

    def ask(self, asked: bytes) -> tuple[Kind, bytearray]:
        """Its answer. Raises EOFError and OSError."""
        send(self._socket, "render", asked)
        return receive(self._socket)

    def end(self) -> None:
        """Ends it; whoever waits for its answer gets an EOFError."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._popen.kill()  # does nothing to one that has ended: its status stays what it was
        self._popen.wait()
        self._socket.close()


def _rest(kind: Kind, content: bytearray) -> Rest | None:
    if kind == "text":
        end = content.index(b"\n")
        waypoint = _WAYPOINT.decode(memoryview(content)[:end])
        return Rest(_decoded(memoryview(content)[end + 1 :]), waypoint)
    if kind == "lost":
        return None
    if kind == "stopped":
        raise _too_slow()
    raise InvalidRequest(content.decode(), field="messages")


def _sliced(value: Any) -> Any:
    """A JSON value whose long texts are JSON already, encoded in slices, between which other threads run."""
    if isinstance(value, str):
        return _encoded(value) if len(value) > _SLICE else value
    if isinstance(value, Mapping):
        return {name: _sliced(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_sliced(inner) for inner in value]
    return value


def _encoded(text: str) -> msgspec.Raw:
    slices = (msgspec.json.encode(text[at : at + _SLICE])[1:-1] for at in range(0, len(text), _SLICE))
    return msgspec.Raw(b"".join([b'"', *slices, b'"']))


def _decoded(content: memoryview) -> str:
    """In slices, between which other threads run."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    return "".join([decoder.decode(content[at : at + _SLICE]) for at in range(0, len(content), _SLICE)])


def _stopping() -> Unavailable:
    return Unavailable("the gateway is stopping", code="unavailable", retry_after=1)


def _too_slow() -> InvalidRequest:
    return InvalidRequest("messages: the chat template takes too long to render these", field="messages")


@asynccontextmanager
async def open_processes(template: ChatTemplate, *, seconds: float = RENDER_S) -> AsyncIterator[RenderProcesses]:
    """Processes for the length of the block; the first is started at once."""
    processes = RenderProcesses(template, seconds=seconds)
    try:
        await asyncio.to_thread(processes.start)
        yield processes
    finally:
        await asyncio.to_thread(processes.close)


@asynccontextmanager
async def rendering_apart(model: ChatModel) -> AsyncIterator[ChatModel]:
    """`model` with its template in other processes for the length of the block."""
    if not isinstance(model.template, ChatTemplate):
        yield model
        return
    async with open_processes(model.template) as processes:
        yield replace(model, template=processes)
