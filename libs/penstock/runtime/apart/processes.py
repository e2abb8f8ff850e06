"""Processes that work for those who ask, one ask at a time each; they wait in threads."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import structlog

from penstock.errors import Unavailable
from penstock.runtime.apart.frames import Kind, receive, send

_SILENCE_S = 120.0
"""Seconds of the clock after which a process is ended that neither answers nor uses its processor."""


class OutOfTime(Exception):
    """The work has used its processor for too long, and was stopped, or its process ended."""


class ProcessesApart:
    """Processes of one kind, started when they are first needed."""

    def __init__(self, module: str, setup: bytes, *, most: int, what: str) -> None:
        """`module` is run with -m; it serves as `penstock.runtime.apart.serving` does, and gets `setup` first. At most
        `most` processes work at a time. `what` says in errors what could not be done."""
        self._command = [sys.executable, "-P", "-m", module]  # else the working directory comes before all modules
        self._setup = setup
        self._what = what
        self._room = threading.BoundedSemaphore(most)
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Of the processes that are ready or work."""
        with self._lock:
            return [process.pid for process in self._all]

    def ask(self, content: bytes) -> tuple[Kind, bytearray]:
        """The answer of one of them. Raises OutOfTime, and Unavailable when a process ends for another reason."""
        with self._room:
            process = self._take()
            try:
                answer = process.ask(content)
            except (EOFError, OSError):
                self._replace(process)
            else:
                with self._lock:
                    self._idle.append(process)
                if answer[0] == "stopped":
                    raise OutOfTime
                return answer
        if process.out_of_time:
            raise OutOfTime
        if self._closed:
            raise _stopping()
        log = structlog.get_logger("penstock")
        log.warning("a process that works apart has ended", what=self._what, status=process.status)
        raise Unavailable(f"{self._what}; try again", code="unavailable", retry_after=1)

    def start(self) -> None:
        """Starts a process, so that the first who asks need not wait until it has."""
        process = _Process(self._command, self._setup)
        with self._lock:
            if not self._closed:
                self._all.add(process)
                self._idle.append(process)
                return
        process.end()

    def close(self) -> None:
        """Ends all processes; who still waits for one gets Unavailable."""
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

    def __init__(self, command: list[str], setup: bytes) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_SILENCE_S)
        with theirs:
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
        send(self._socket, "ask", asked)
        return receive(self._socket)

    def end(self) -> None:
        """Ends it; whoever waits for its answer gets an EOFError."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._popen.kill()  # does nothing to one that has ended: its status stays what it was
        self._popen.wait()
        self._socket.close()


def _stopping() -> Unavailable:
    return Unavailable("the gateway is stopping", code="unavailable", retry_after=1)
