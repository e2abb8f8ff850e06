"""Reading from a socket that blocks."""

from __future__ import annotations

import socket


def receive_exactly(source: socket.socket, count: int) -> bytearray:
    """So many bytes. Raises EOFError when the other side has ended before, and OSError."""
    found = bytearray(count)
    room = memoryview(found)
    while room:
        got = source.recv_into(room)
        if not got:
            raise EOFError("the other side has ended")
        room = room[got:]
    return found
