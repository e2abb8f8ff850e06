"""What a process that renders and the one that asks it say to each other: a kind and some bytes.

The content of `render` is JSON: messages, tools, a waypoint, whether an answer is opened, and variables; that of `text`
is the next waypoint as JSON, a line feed, and the text.
"""

from __future__ import annotations

import socket
import struct
from typing import Literal

from penstock.runtime.exactly import receive_exactly

_HEAD = struct.Struct("!BQ")
_KINDS = ("setup", "render", "text", "lost", "refusal", "stopped")

Kind = Literal["setup", "render", "text", "lost", "refusal", "stopped"]


def send(to: socket.socket, kind: Kind, content: bytes) -> None:
    """Sends one frame. Raises OSError."""
    to.sendall(_HEAD.pack(_KINDS.index(kind), len(content)))
    to.sendall(content)


def receive(from_: socket.socket) -> tuple[Kind, bytearray]:
    """The next frame. Raises EOFError when the other side has ended, and OSError."""
    number, length = _HEAD.unpack(receive_exactly(from_, _HEAD.size))
    return _KINDS[number], receive_exactly(from_, length)  # type: ignore[return-value]
