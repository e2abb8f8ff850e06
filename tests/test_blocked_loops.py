"""The watch for blocked event loops sees what it should, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.blocked_loops import Blocked, LoopWatch

LIMIT_S = 0.05
LONG_S = 0.2


def watched(job: Callable[[], Coroutine[Any, Any, None]]) -> list[Blocked]:
    """What the watch finds while `job` runs as a task of a loop of its own. Here nobody is a client."""
    watch = LoopWatch(LIMIT_S, clients=())
    found: list[Blocked] = []

    def run() -> None:
        with watch.watching():
            asyncio.run(main())
            found.extend(watch.take())

    async def main() -> None:
        await asyncio.create_task(job(), name="service")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


@pytest.fixture(autouse=True)
def nothing_stolen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's host may take more of a processor than any step here lasts."""
    monkeypatch.setattr("tests.blocked_loops._stolen", lambda: 0.0)


def test_a_call_that_blocks_is_found_with_its_place() -> None:
    async def job() -> None:
        time.sleep(LONG_S)  # noqa: ASYNC251

    [found] = watched(job)
    assert found.task.startswith("task service")
    assert found.seconds >= LONG_S * 0.9
    assert "time.sleep(LONG_S)" in found.stack


def test_computing_is_found() -> None:
    async def job() -> None:
        end = time.thread_time() + LONG_S
        while time.thread_time() < end:
            hashlib.sha256(b"x" * 1000).digest()

    assert len(watched(job)) == 1


def test_waiting_for_the_lock_that_a_thread_holds_is_found() -> None:
    begins = threading.Event()

    def hold() -> None:
        begins.set()
        sum(range(20_000_000))  # one call into C, which keeps the lock

    async def job() -> None:
        thread = threading.Thread(target=hold)
        thread.start()
        begins.wait()
        thread.join()

    assert watched(job)


def test_waiting_as_one_should_is_not_found() -> None:
    async def job() -> None:
        for _ in range(3):
            await asyncio.sleep(LONG_S / 2)

    assert not watched(job)


def test_the_suite_fails_in_this_mode_and_passes_without(tmp_path: Path) -> None:
    """A test whose service blocks, run by pytest in a process of its own."""
    tests = tmp_path / "tests"
    tests.mkdir()
    root = Path(__file__).parents[1]
    (tests / "conftest.py").write_text((root / "tests/conftest.py").read_text())
    watch = (root / "tests/blocked_loops.py").read_text()
    (tests / "blocked_loops.py").write_text(f"{watch}\n\ndef _stolen() -> float:\n    return 0.0\n")
    (tests / "test_it.py").write_text(
        "import asyncio\nfrom service import blocks\nasync def test_it():\n    await asyncio.create_task(blocks())\n"
    )
    (tmp_path / "service.py").write_text("import time\nasync def blocks():\n    time.sleep(0.3)\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\npythonpath = .\n")

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", *more]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert run().returncode == 0
    done = run("--blocked-loop", "50")
    assert done.returncode == 1
    assert "held the event loop for" in done.stdout
