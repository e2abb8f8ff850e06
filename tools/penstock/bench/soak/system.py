"""What Linux says of the processes of a soak, and signals that reach nobody else."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.e2e import processes

_PROC = Path("/proc")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_STARTED = 19
"""Of the fields behind the name in /proc/PID/stat."""


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """One process; another one that later has its number is not it."""

    pid: int
    started: str
    """When, in ticks since the machine's own start."""

    @classmethod
    def of(cls, pid: int) -> RunningProcess:
        """The process that has that number now. Raises ProcessLookupError."""
        return cls(pid, _started(pid))

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if it still runs."""
        with suppress(ProcessLookupError):
            if _started(self.pid) == self.started:
                os.kill(self.pid, number)


def private_bytes(pid: int) -> int:
    """Of its memory what is resident and neither a file nor shared: what tiers and pools of pages take of that is
    bounded, and they fill up. Raises OSError when it has ended."""
    _, resident, shared, *_ = map(int, (_PROC / str(pid) / "statm").read_text().split())
    return (resident - shared) * _PAGE


def descriptors(pid: int) -> int:
    """How many it has open. Raises OSError when it has ended."""
    return len(os.listdir(_PROC / str(pid) / "fd"))


def threads(pid: int) -> int:
    """How many it has. Raises OSError when it has ended."""
    return len(os.listdir(_PROC / str(pid) / "task"))


def children_named(name: str) -> list[int]:
    """Of the processes that descend from this one, those whose program has that name and that run."""
    return [pid for pid in processes.tree(os.getpid()) if _name(pid) == name and _fields(pid)[:1] not in ([], ["Z"])]


def _name(pid: int) -> str:
    with suppress(OSError):
        return (_PROC / str(pid) / "comm").read_text().strip()
    return ""


def _fields(pid: int) -> list[str]:
    with suppress(OSError):
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return []


def _started(pid: int) -> str:
    fields = _fields(pid)
    if not fields or fields[0] == "Z":
        raise ProcessLookupError(f"there is no process {pid}")
    return fields[_STARTED]
