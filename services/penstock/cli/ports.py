"""Reserves addresses before their services listen there, so that all processes can start at once."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

from penstock.runtime.config import HostPort
from penstock.runtime.ports import RESERVED


class PortTaken(OSError):
    """Another process uses the port."""


class Ports:
    """Reserved ports; made by `reserved_ports`.

    On Linux a port stays reserved as long as this object lives: only processes of this user that are told so, by
    `environment`, can listen there, again and again. Elsewhere the port is only likely to stay free.
    """

    environment: ClassVar[Mapping[str, str]] = {RESERVED: "1"} if sys.platform == "linux" else {}
    """For the services that listen on the ports."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def reserve(self, port: int = 0, host: str = "127.0.0.1") -> HostPort:
        """The address of `port`, or of a free one. Raises PortTaken."""
        try:
            if port:
                # SO_REUSEPORT alone would share the port with other services of this user; SO_REUSEADDR only passes
                # over connections that have ended.
                _bound(host, port, socket.SO_REUSEADDR).close()
            holder = _bound(host, port, socket.SO_REUSEPORT)
        except OSError as error:
            raise PortTaken(f"port {port} of {host} cannot be used: {error.strerror}") from error
        address = HostPort(f"{f'[{host}]' if ':' in host else host}:{holder.getsockname()[1]}")
        if self.environment:
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


def _bound(host: str, port: int, option: int) -> socket.socket:
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    holder = socket.socket(family, kind)
    try:
        holder.setsockopt(socket.SOL_SOCKET, option, 1)
        holder.bind(target)
    except OSError:
        holder.close()
        raise
    return holder
