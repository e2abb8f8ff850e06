"""The side of a process that works apart, with a socket as its standard input.

It ends when the other side of the socket does. Work that takes too long is stopped by a signal, between two steps of
the interpreter; the kernel ends the process if a single step takes too long.
"""

from __future__ import annotations

import gc
import math
import resource
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from penstock.errors import InvalidRequest
from penstock.runtime.apart.frames import Kind, receive, send

Answer = tuple[Kind, bytes | memoryview]
Works = Callable[[bytearray], Answer]
"""Answers one ask. Raises InvalidRequest."""
_AGAIN_S = 0.05
"""Seconds between the signals: the first may come where its error is lost, as in a finalizer."""


class Stopped(BaseException):
    """Out of time. Not an Exception, which what is called might take for its own."""


def serve_apart(make: Callable[[bytearray], tuple[Works, float]], *, memory: int) -> None:
    """Answers until the other side ends. `make` gets the setup, and gives what answers and the seconds of a processor
    that it may take for each ask; `memory` are bytes of address space, beyond which there is a MemoryError."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the other side decides
    signal.signal(signal.SIGPROF, _stop)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=0) as other:
        try:
            works, seconds = make(receive(other)[1])
            gc.freeze()
            while True:
                _, asked = receive(other)
                send(other, *_answer(works, asked, seconds))
        except (EOFError, OSError):
            return


def _answer(works: Works, asked: bytearray, seconds: float) -> Answer:
    try:
        return _limited(lambda: works(asked), seconds)
    except InvalidRequest as error:
        return "refusal", error.message.encode(errors="replace")
    except Stopped:
        signal.setitimer(signal.ITIMER_PROF, 0)
        return "stopped", b""


def _limited(work: Callable[[], Answer], seconds: float) -> Answer:
    """The result of `work`. Raises Stopped when it takes more than `seconds` of a processor."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds) + 1, hard))
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_S)
        return work()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _stop(*_: Any) -> None:
    raise Stopped
