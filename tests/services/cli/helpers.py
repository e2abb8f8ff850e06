"""Fake services and what was seen of them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from penstock.cli.child import ChildSpec
from penstock.cli.supervisor import ChildChange, ChildState
from penstock.runtime.ports import RESERVED

REPOSITORY = Path(__file__).parents[3]
FAKE = Path(__file__).with_name("fake_service.py")
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(str(REPOSITORY / part) for part in ("", "libs", "services", "tools"))}


def fake(name: str, behaviour: str = "", diary: Path | None = None, stop_stage: int = 0) -> ChildSpec:
    command = (sys.executable, str(FAKE), name, behaviour, str(diary or ""))
    return ChildSpec(name, command, stop_stage, {**ENVIRONMENT, RESERVED: "1"})


class Onlooker:
    """Collects changes and lines, and lets a test wait for one."""

    def __init__(self) -> None:
        self.changes: list[ChildChange] = []
        self.lines: list[tuple[str, str]] = []
        self._news = asyncio.Event()

    def change(self, change: ChildChange) -> None:
        self.changes.append(change)
        self._news.set()

    def line(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self._news.set()

    def count(self, name: str, state: ChildState) -> int:
        return sum(change.name == name and change.state is state for change in self.changes)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self._news.clear()
                await self._news.wait()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
