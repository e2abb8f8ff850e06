"""All processes of a server: what they cost, and stopping and ending them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_MEMORY_FILES = ("/dev/shm/", "/memfd:", "/dev/zero")
"""Paths of mappings that are memory, not files."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A mapping of one process, in bytes."""

    path: str
    """Empty without one."""
    resident: int
    proportional: int
    """Each page divided by how many processes map it."""


def tree(root: int) -> list[int]:
    """The process and all that descend from it, the oldest first; empty when there is none."""
    parents = {pid: parent for pid in _pids() if (parent := _parent(pid)) is not None}
    if root not in parents:
        return []
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """Seconds of processor time that the processes have used, with those of their children that have ended."""
    return sum(sum(map(int, fields[11:15])) for fields in map(_stat, pids) if fields) / _TICKS


def memory_bytes(pids: Iterable[int]) -> int:
    """Memory of the processes together; see `together`."""
    return together([list(_mappings(pid)) for pid in pids])


def together(processes: Iterable[Sequence[Mapped]]) -> int:
    """Bytes of memory that processes take which share nothing but files with any others.

    Memory counts by proportion. A page of a file counts once: by proportion, another server that maps the same weights
    would take half of them.
    """
    files: dict[str, int] = {}
    memory = 0
    for mappings in processes:
        own: dict[str, int] = {}
        for each in mappings:
            if each.path.startswith("/") and not each.path.startswith(_MEMORY_FILES):
                own[each.path] = own.get(each.path, 0) + each.resident
            else:
                memory += each.proportional
        for path, resident in own.items():
            files[path] = max(files.get(path, 0), resident)
    return memory + sum(files.values())


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Sends a signal to those that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def named(pids: Iterable[int], word: str) -> list[int]:
    """Those with an argument that is `word`, also where a process has written its command line itself."""
    return [pid for pid in pids if word in _command(pid)]


def _pids() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty when the process has gone."""
    with suppress(OSError):
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return []


def _command(pid: int) -> list[str]:
    with suppress(OSError):
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split()
    return []


def _mappings(pid: int) -> Iterable[Mapped]:
    try:
        lines = (_PROC / str(pid) / "smaps").read_text().splitlines()
    except OSError:
        return
    path, sizes = "", dict[str, int]()
    for line in lines:
        name, _, value = line.partition(":")
        if " " not in name:
            sizes[name] = int(value.split()[0]) << 10 if value.endswith("kB") else 0
            continue
        if sizes:
            yield _mapped(path, sizes)
        path, sizes = [*line.split(maxsplit=5), ""][5], {}
    if sizes:
        yield _mapped(path, sizes)


def _mapped(path: str, sizes: Mapping[str, int]) -> Mapped:
    return Mapped(path, sizes.get("Rss", 0), sizes.get("Pss", 0))
