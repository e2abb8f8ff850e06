"""Reserves addresses before their services listen there, so that all processes can start at once.

Services of one mesh that talk to each other alone do so over Unix sockets: in a directory that nobody but its user may
enter there is nothing to squat, and nothing to connect to, for any other.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from penstock.runtime.addresses import LONGEST_PATH, HostPort, UnixPath
from penstock.runtime.ports import RESERVED, SOCKETS

_PREFIX = "penstock-"
_ROOM = 48
"""Bytes of a socket's path for the directory's name and its own."""


_RESERVED: Mapping[str, str] = {RESERVED: "1"} if sys.platform == "linux" else {}


class PortTaken(OSError):
    """Another process uses the port."""


class Ports:
    """Reserved ports, and Unix sockets; made by `reserved_ports`.

    On Linux a port stays reserved as long as this object lives: only processes of this user that are told so, by
    `environment`, can listen there, again and again. Elsewhere the port is only likely to stay free.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        self._directory: Path | None = None
        """Of the Unix sockets, once there is one."""

    @property
    def environment(self) -> Mapping[str, str]:
        """For the services that listen there."""
        sockets = {} if self._directory is None else {SOCKETS: str(self._directory)}
        return {**_RESERVED, **sockets}

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
        if _RESERVED:
            self._held.append(holder)
        else:
            holder.close()
        return address

    def socket(self, name: str) -> UnixPath:
        """A Unix socket that only this user can open. Raises OSError when there is no place for it."""
        if self._directory is None:
            self._directory = _private_directory()
        return UnixPath(f"unix:{self._directory / name}")

    def close(self) -> None:
        """Gives all back."""
        for holder in self._held:
            holder.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


@contextmanager
def reserved_ports() -> Iterator[Ports]:
    """A `Ports` for the length of the block."""
    ports = Ports()
    try:
        yield ports
    finally:
        ports.close()


def _private_directory() -> Path:
    """A new one of mode 0700 (mkdtemp), whose path leaves room for names. Raises OSError."""
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if parent and Path(parent).is_absolute() and len(os.fsencode(parent)) <= LONGEST_PATH - _ROOM:
            try:
                return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            except OSError:
                continue
    raise OSError("no directory for Unix sockets can be made; set TMPDIR to one with a short path, or --sockets tcp")


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
