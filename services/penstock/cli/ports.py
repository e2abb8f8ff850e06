"""Reserves addresses before their services listen there, so that all processes can start at once."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class PortTaken(OSError):
    """Another process uses the port."""


class Ports:
    """Reserved ports of 127.0.0.1; made by `reserved_ports`.

    On Linux a port stays reserved as long as this object lives: a bound socket that does not listen keeps the kernel
    from giving the port away, and lets a server that sets SO_REUSEADDR, as ours do, listen on it, again and again.
    Elsewhere the port is only likely to stay free.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def reserve(self, port: int = 0) -> str:
        """host:port of `port`, or of a free one. Raises PortTaken."""
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", port))
        except OSError as error:
            holder.close()
            raise PortTaken(f"port {port} of 127.0.0.1 cannot be used: {error.strerror}") from error
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        if sys.platform == "linux":
            self._held.append(holder)
        else:
            holder.close()
        return address

    def close(self) -> None:
        """Gives all back."""
        for holder in self._held:
            holder.close()


@contextmanager
def reserved_ports() -> Iterator[Ports]:
    """A `Ports` for the length of the block."""
    ports = Ports()
    try:
        yield ports
    finally:
        ports.close()
