"""`penstock up` from outside, with fake services."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest
from tests.services.cli.helpers import ENVIRONMENT, REPOSITORY

SCRIPT = REPOSITORY / "tests" / "services" / "cli" / "fake_up.py"


@asynccontextmanager
async def up(*behaviours: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SCRIPT), *behaviours),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def end(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    """Exit code and what was written since."""
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_one_line_when_a_request_would_succeed_and_nothing_left_behind(number: signal.Signals) -> None:
    async with up("", "chatty") as process:
        assert process.stdout is not None
        line = await process.stdout.readline()
        assert re.fullmatch(r"ready http://127\.0\.0\.1:\d+\n", line.decode())
        children = psutil.Process(process.pid).children()
        assert len(children) == 3
        process.send_signal(number)
        code, out, err = await end(process)
        assert (code, out) == (0, "")
        assert "child-1 warning: mind the gap" in err
        assert "child-0 is ready (" in err and "gRPC" in err, "off a terminal too"
        assert "Ctrl-C again ends everything at once" in err
        _, left = await asyncio.to_thread(psutil.wait_procs, children, 5)
        assert left == []


async def test_a_child_that_fails_is_quoted() -> None:
    async with up("", "broken") as process:
        code, out, err = await end(process)
    assert (code, out) == (1, "")
    assert "penstock: child-1 ended with exit code 3" in err
    assert "error: no such model: model=x" in err


async def test_a_signal_while_starting_stops_all() -> None:
    async with up("slow") as process:
        parent = psutil.Process(process.pid)
        async with asyncio.timeout(20):
            while len(parent.children()) < 2:
                await asyncio.sleep(0.01)
        children = parent.children()
        process.send_signal(signal.SIGINT)
        code, out, _ = await end(process)
        assert (code, out) == (130, "")
        _, left = await asyncio.to_thread(psutil.wait_procs, children, 5)
        assert left == []


async def test_a_second_signal_does_not_wait_for_a_child_that_hangs() -> None:
    async with up("hung") as process:
        assert process.stdout is not None
        await process.stdout.readline()
        gateway = [child for child in psutil.Process(process.pid).children() if "gateway" in child.cmdline()]
        began = asyncio.get_running_loop().time()
        process.send_signal(signal.SIGINT)
        await asyncio.to_thread(psutil.wait_procs, gateway, 10)
        process.send_signal(signal.SIGINT)
        code, _, _ = await end(process)
        assert code == 0
        assert asyncio.get_running_loop().time() - began < 6
