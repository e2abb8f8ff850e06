"""What goes wrong with a service: how it begins, and how it ends."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Literal

from penstock.bench.soak.mesh import SoakMesh
from penstock.bench.soak.system import RunningProcess
from penstock.testing.wires import MeshWires

Act = Literal["kill", "stop", "cut", "slow", "disk full", "no memory", "corrupt"]
ACTS: Mapping[Act, str] = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP, until its supervisor kills it",
    "cut": "nothing reaches it or leaves it for four seconds",
    "slow": "4 KiB in 20 ms on each of its ways",
    "disk full": "no file that it writes gets any longer",
    "no memory": "it gets no more address space",
    "corrupt": "bytes of all its files change",
}
CUT_S = 4.0
"""Longer than a worker may be silent."""
_SLOW_S = 0.02
_SPACE = 1 << 20
"""Bytes that are left to one that gets no more."""
_EVERY = 4096
"""Of so many bytes of a file one changes."""
_OF_REDIS = ("kill", "stop", "cut", "slow", "no memory")


def acts_of(kind: str) -> list[Act]:
    """Those that mean something for a service of that kind: only stores keep what can be corrupted, and the Redis of a
    mesh writes no files."""
    means = _OF_REDIS if kind == "redis" else tuple(act for act in ACTS if act != "corrupt" or kind == "kvstore")
    return [act for act in ACTS if act in means]


@asynccontextmanager
async def struck(mesh: SoakMesh, wires: MeshWires, files: Path, service: str, act: Act) -> AsyncIterator[None]:
    """The service has that fault, for the length of the block where it does not end by itself: afterwards all is well,
    as soon as whoever died is back. `files` are those of the store. Raises KeyError and ProcessLookupError for a
    service that does not run."""
    process = RunningProcess.of(mesh.pids()[service])
    if act == "kill":
        mesh.gone(service)
        process.send(signal.SIGKILL)
        yield
    elif act == "stop":
        mesh.gone(service)
        process.send(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send(signal.SIGKILL)  # by now others have done without it; a supervisor would take longer
    elif act == "cut":
        wires.cut(service)
        healing = asyncio.get_running_loop().call_later(CUT_S, wires.heal, service)
        try:
            yield
        finally:
            healing.cancel()
            wires.heal(service)
    elif act == "slow":
        wires.slow(service, _SLOW_S)
        try:
            yield
        finally:
            wires.heal(service)
    elif act == "corrupt":
        _corrupt(files)
        yield
    else:
        kind, most = (resource.RLIMIT_FSIZE, 0) if act == "disk full" else (resource.RLIMIT_AS, _mapped(process.pid))
        with _limited(process.pid, kind, most):
            yield


@contextmanager
def _limited(pid: int, kind: int, most: int) -> Iterator[None]:
    """A process may have no more of something, for the length of the block or its life."""
    _, hard = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (most, hard))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, kind, (hard, hard))


def _mapped(pid: int) -> int:
    """Bytes of its address space, and a few more."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE") + _SPACE


def _corrupt(files: Path) -> None:
    for file in files.rglob("*"):
        if file.is_file() and not file.is_symlink():
            with file.open("r+b", buffering=0) as opened:
                for at in range(_EVERY // 2, file.stat().st_size, _EVERY):
                    one = os.pread(opened.fileno(), 1, at)
                    os.pwrite(opened.fileno(), bytes([one[0] ^ 0x55]), at)
