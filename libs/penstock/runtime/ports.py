"""Ports, and Unix sockets, that a supervisor has reserved for its services.

The supervisor binds each port with SO_REUSEPORT and keeps that socket without listening. The kernel lets only processes
of the same user that set SO_REUSEPORT too listen there. A service sets it only when its supervisor says so: else two
services that were given one address by mistake would share its connections instead of one of them being refused.
"""

from __future__ import annotations

import os
import shutil

RESERVED = "PENSTOCK_PORTS_RESERVED"
SOCKETS = "PENSTOCK_SOCKETS"
"""The environment variable with the directory of the supervisor's Unix sockets, which its services remove when it has
been killed, and could not."""


def ports_are_reserved() -> bool:
    """Whether the listeners of this process must set SO_REUSEPORT."""
    return os.environ.get(RESERVED) == "1"


def remove_sockets() -> None:
    """Removes the directory of the supervisor's Unix sockets, where it has one. Connections go on."""
    if directory := os.environ.get(SOCKETS):
        shutil.rmtree(directory, ignore_errors=True)
