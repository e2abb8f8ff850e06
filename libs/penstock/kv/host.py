"""The name of the host, on which the members of the mesh that can share memory agree."""

from __future__ import annotations

import socket


def host_id() -> str:
    """The host's name; two containers of one machine have different ones, and indeed can't share memory.

    Where two machines have one name, set the ids. Left alone, each would try once to map the other's memory, find
    that it is not there, and stream.
    """
    return socket.gethostname()
