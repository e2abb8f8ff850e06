"""What a process that works apart and the one that asks it say to each other: a kind and some bytes."""

from __future__ import annotations

import socket
import struct
from typing import Literal

from penstock.runtime.exactly import receive_exactly

_HEAD = struct.Struct("!BQ")
_KINDS = ("setup", "ask", "answer", "nothing", "refusal", "stopped")

Kind = Literal["setup", "ask", "answer", "nothing", "refusal", "stopped"]


def send(to: socket.socket, kind: Kind, content: bytes | memoryview) -> None:
    """Sends one frame. Raises OSError."""
    to.sendall(_HEAD.pack(_KINDS.index(kind), len(content)))
    to.sendall(content)


def receive(from_: socket.socket) -> tuple[Kind, bytearray]:
    """The next frame. Raises EOFError when the other side has ended, and OSError."""
    number, length = _HEAD.unpack(receive_exactly(from_, _HEAD.size))
    return _KINDS[number], receive_exactly(from_, length)  # type: ignore[return-value]
