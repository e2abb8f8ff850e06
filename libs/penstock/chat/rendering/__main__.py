"""The process that renders: `python -m penstock.chat.rendering`, with a socket as its standard input.

It ends when the other side of the socket does. A rendering that takes too long is stopped by a signal, between two
steps of the interpreter; the kernel ends the process if a single step takes too long.
"""

from __future__ import annotations

import gc
import json
import math
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from penstock.chat.rendering.frames import Kind, receive, send
from penstock.chat.resuming.waypoint import Waypoint
from penstock.chat.template import ChatTemplate
from penstock.errors import InvalidRequest

_MEMORY = 2 << 30
"""Bytes of address space; what a template makes beyond them is a MemoryError."""
_AGAIN_S = 0.05
"""Seconds between the signals: the first may come where its error is lost, as in a finalizer."""


class _Stopped(BaseException):
    """Out of time. Not an Exception, which a template's machinery might take for its own."""


def main() -> None:
    """Renders until the other side ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the other side decides
    signal.signal(signal.SIGPROF, _stop)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=0) as other:
        try:
            _, setup = receive(other)
            settings = json.loads(setup)
            template = ChatTemplate(settings["source"], settings["special_tokens"])
            template.compile()
            gc.freeze()
            while True:
                _, asked = receive(other)
                send(other, *_answer(template, asked, settings["seconds"]))
        except (EOFError, OSError):
            return


def _answer(template: ChatTemplate, asked: bytearray, seconds: float) -> tuple[Kind, bytes]:
    try:
        return _limited(lambda: _render(template, asked), seconds)
    except InvalidRequest as error:
        return "refusal", error.message.encode(errors="replace")
    except _Stopped:
        signal.setitimer(signal.ITIMER_PROF, 0)
        return "stopped", b""


def _render(template: ChatTemplate, asked: bytearray) -> tuple[Kind, bytes]:
    try:
        messages, tools, waypoint, generate, variables = json.loads(asked)
        place = None if waypoint is None else Waypoint(**waypoint)
        rest = template.resume(messages, tools, place, generate=generate, variables=variables)
        if rest is None:
            return "lost", b""
        following = None if rest.waypoint is None else asdict(rest.waypoint)
        return "text", json.dumps(following).encode() + b"\n" + rest.text.encode(errors="replace")
    except (RecursionError, MemoryError):
        raise InvalidRequest("the chat template cannot render these") from None


def _limited(work: Callable[[], tuple[Kind, bytes]], seconds: float) -> tuple[Kind, bytes]:
    """The result of `work`. Raises _Stopped when it takes more than `seconds` of a processor."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds) + 1, hard))
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_S)
        return work()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _stop(*_: Any) -> None:
    raise _Stopped


if __name__ == "__main__":
    main()
