"""Where a listener is: a port of a host, or a Unix socket."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Self

_HOST_PORT = re.compile(r"(?P<host>[^\s:/\[\]]+|\[[0-9A-Fa-f:.%a-z]+\]):(?P<port>[0-9]{1,5})")
UNIX = "unix:"
LONGEST_PATH = 103
"""Bytes in the path of a Unix socket: all systems have room for so many."""


class HostPort(str):
    """`"host:port"`, taken apart in this one place. An IPv6 address stands in brackets: `"[::1]:7401"`."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """Raises ValueError that says what would be right."""
        match = _HOST_PORT.fullmatch(text)
        if match is None or int(match["port"]) > 65535:
            raise ValueError(f"{str(text)!r} is not an address; write host:port, for example 127.0.0.1:7401")
        return super().__new__(cls, text)

    @property
    def host(self) -> str:
        """As sockets want it: without the brackets of IPv6."""
        return self.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """0 where a listener lets the kernel choose."""
        return int(self.rpartition(":")[2])

    def at(self, port: int) -> HostPort:
        """The same host with another port."""
        return HostPort(f"{self.rpartition(':')[0]}:{port}")


class UnixPath(str):
    """`"unix:/path"`: a Unix socket. Who may connect is who may enter its directory."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """Raises ValueError that says what would be right."""
        path = text.removeprefix(UNIX)
        if path == text or not path.startswith("/") or path.endswith("/") or not path.isprintable():
            raise ValueError(f"{str(text)!r} is not a Unix socket; write unix:/path, from the root of the file system")
        if len(path.encode()) > LONGEST_PATH:
            raise ValueError(f"{str(text)!r} is too long for a Unix socket: a path has at most {LONGEST_PATH} bytes")
        return super().__new__(cls, text)

    @property
    def path(self) -> str:
        """The file."""
        return self.removeprefix(UNIX)

    def at(self, port: int) -> UnixPath:
        """Itself: it has no port for the kernel to choose."""
        return self


SocketAddress = HostPort | UnixPath


def socket_address(text: str) -> SocketAddress:
    """Either kind. Raises ValueError that says what would be right."""
    return UnixPath(text) if text.startswith(UNIX) else HostPort(text)


def is_loopback(host: str) -> bool:
    """Whether a name or an address means this machine, and is reached from nowhere else."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
