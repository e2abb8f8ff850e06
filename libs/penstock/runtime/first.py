"""`python -m penstock.runtime.first`: the first process of containers that share one view of processes.

When it ends, Linux kills all others in that view. So it stays while they come and go, and when it is told to end it
waits until they have ended. Orphans become its children, and leave no zombies.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_PERIOD_S = 0.05
_PROC = Path("/proc")
_ENDS = (signal.SIGTERM, signal.SIGINT)


def others(proc: Path = _PROC) -> set[int]:
    """The processes that this one sees, without itself."""
    return {int(name) for name in os.listdir(proc) if name.isdigit()} - {os.getpid()}


def main() -> None:
    """Returns when it was told to end and is the last process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)  # as a first process it would not get them otherwise
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.sigwait(_ENDS)
    while others():
        time.sleep(_PERIOD_S)


if __name__ == "__main__":
    main()
