"""The name of the host, on which the members of the mesh that can share memory agree."""

from __future__ import annotations

import socket
from pathlib import Path

_SOURCES = (Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id"))


def host_id() -> str:
    """The host name and the start of the machine's id.

    Two containers of one machine have different host names and so different ids: they can't reach each other's
    memory through /proc and have to stream. An id that is wrongly equal costs one failed attempt to map.
    """
    for source in _SOURCES:
        try:
            return f"{socket.gethostname()}-{source.read_text().strip()[:8]}"
        except OSError:
            continue
    return socket.gethostname()
