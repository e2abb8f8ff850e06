"""The first process of a view of processes stays until it is told to end, and the others have ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.runtime.first import others

_TOOLS = ("unshare", "nsenter")
_LIMIT_S = 30.0
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, _TOOLS)), reason="only root may make a view of processes"
)


def until(what: Callable[[], object]) -> None:
    limit = time.monotonic() + _LIMIT_S
    while not what():
        assert time.monotonic() < limit, "it has not come about"
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has(pid: int, name: str, number: signal.Signals) -> bool:
    """Whether a signal is in a set of the process: SigIgn, those it ignores, or SigBlk, those it holds back, which it
    does not while it waits for them."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(name))
    return bool(int(line.split()[1], 16) & 1 << number - 1)


def waits(pid: int) -> bool:
    return has(pid, "SigIgn", signal.SIGCHLD) and not has(pid, "SigBlk", signal.SIGTERM)


@contextmanager
def first() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """It with a view of its own, and its number outside."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with subprocess.Popen([*command, sys.executable, "-m", "penstock.runtime.first"]) as outer:
        try:
            until(lambda: children(outer.pid))
            [pid] = children(outer.pid)
            until(lambda: waits(pid))
            yield outer, pid
        finally:
            outer.kill()


def test_it_ends_after_the_others() -> None:
    with first() as (outer, pid):
        enter = ["nsenter", "--target", str(pid), "--pid", "--mount", "sleep", "infinity"]
        with subprocess.Popen(enter) as entered:
            until(lambda: children(entered.pid))
            os.kill(pid, signal.SIGTERM)
            until(lambda: not waits(pid))
            assert outer.poll() is None, "another process is there"
            os.kill(children(entered.pid)[0], signal.SIGKILL)
        assert outer.wait(_LIMIT_S) == 0


def test_it_stays_until_it_is_told() -> None:
    with first() as (outer, pid):
        assert outer.poll() is None and waits(pid)
        os.kill(pid, signal.SIGTERM)
        assert outer.wait(_LIMIT_S) == 0


def test_others_are_all_but_itself(tmp_path: Path) -> None:
    for name in ("1", "27", str(os.getpid()), "self", "meminfo"):
        (tmp_path / name).mkdir()
    assert others(tmp_path) == {1, 27}
