"""The life of a process, seen from its supervisor's end of the socket pair."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.runtime.lifecycle import SUPERVISOR_FD

LIBS = Path(__file__).parents[3] / "libs"

PROGRAM = """
import asyncio, os, sys, time
from penstock.runtime.config import ConfigError
from penstock.runtime.lifecycle import run

async def main(lifecycle):
    what = sys.argv[1]
    if what == "stuck":
        print("begun", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            print("cleaned", flush=True)
    if what == "misset":
        async with asyncio.TaskGroup():
            raise ConfigError("port", 1, "no")
    if what == "fails":
        raise RuntimeError("a real fault")
    lifecycle.ready(address="here", pid=os.getpid())
    if what == "hangs":
        time.sleep(60)
    await lifecycle.stopped()
    if what == "dawdles":
        print("stopping", flush=True)
        await asyncio.Event().wait()
    if what == "talks":
        for _ in range(100):
            print("still talking", flush=True)
            print("still talking", file=sys.stderr, flush=True)
    open(sys.argv[2], "w").write("stopped in order")

try:
    run(main, orphan_grace_s=0.5)
except ConfigError as error:
    sys.exit(f"bare: {error}")
"""


@dataclass
class Service:
    """One process and our end of the pair."""

    process: asyncio.subprocess.Process
    supervisor: socket.socket
    diary: Path

    async def ready(self) -> dict[str, object]:
        """What it says of itself."""
        line = await asyncio.get_running_loop().sock_recv(self.supervisor, 4096)
        return json.loads(line)

    async def ended(self) -> int:
        """Its exit code, within a bounded time."""
        async with asyncio.timeout(20):
            return await self.process.wait()


@asynccontextmanager
async def service(what: str, diary: Path, **environment: str) -> AsyncIterator[Service]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", PROGRAM, what, str(diary)),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": str(LIBS), SUPERVISOR_FD: str(theirs.fileno()), **environment},
            )
        try:
            yield Service(process, ours, diary)
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_ready_then_stopped_by_signal(number: signal.Signals, tmp_path: Path) -> None:
    async with service("good", tmp_path / "diary") as running:
        assert await running.ready() == {"address": "here", "pid": running.process.pid}
        running.process.send_signal(number)
        assert await running.ended() == 0
        assert running.diary.read_text() == "stopped in order"


async def test_the_end_of_the_supervisor_is_the_end_of_the_service(tmp_path: Path) -> None:
    async with service("good", tmp_path / "diary") as running:
        await running.ready()
        running.supervisor.close()
        assert await running.ended() == 0
        assert running.diary.read_text() == "stopped in order"


async def test_output_that_nobody_reads_does_not_fail_the_stop(tmp_path: Path) -> None:
    async with service("talks", tmp_path / "diary") as running:
        await running.ready()
        for pipe in (1, 2):
            running.process._transport.get_pipe_transport(pipe).close()  # type: ignore[attr-defined]
        running.supervisor.close()
        assert await running.ended() == 0
        assert running.diary.read_text() == "stopped in order"


@pytest.mark.parametrize("what", ["hangs", "dawdles"])
async def test_an_orphan_that_can_not_stop_ends_all_the_same(what: str, tmp_path: Path) -> None:
    async with service(what, tmp_path / "diary") as running:
        await running.ready()
        running.supervisor.close()
        assert await running.ended() == 1
        assert not running.diary.exists()


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with service("dawdles", tmp_path / "diary") as running:
        await running.ready()
        running.process.terminate()
        assert running.process.stdout is not None
        async for line in running.process.stdout:
            if line == b"stopping\n":
                break
        running.process.terminate()
        assert await running.ended() == 128 + signal.SIGTERM


async def test_a_start_that_waits_can_be_stopped(tmp_path: Path) -> None:
    async with service("stuck", tmp_path / "diary") as running:
        assert running.process.stdout is not None
        assert await running.process.stdout.readline() == b"begun\n"
        running.process.terminate()
        assert await running.process.stdout.readline() == b"cleaned\n"
        assert await running.ended() == 0


async def test_a_wrong_setting_comes_out_of_task_groups_bare(tmp_path: Path) -> None:
    async with service("misset", tmp_path / "diary") as running:
        assert await running.ended() == 1
        assert running.process.stderr is not None
        assert (await running.process.stderr.read()).decode() == "bare: port = 1: no\n"


async def test_other_faults_keep_their_traceback(tmp_path: Path) -> None:
    async with service("fails", tmp_path / "diary") as running:
        assert await running.ended() == 1
        assert running.process.stderr is not None
        assert "RuntimeError: a real fault" in (await running.process.stderr.read()).decode()


@asynccontextmanager
async def systemd(where: str) -> AsyncIterator[asyncio.Queue[str]]:
    """What a service tells at this address, as systemd would hear it."""
    heard: asyncio.Queue[str] = asyncio.Queue()

    class Hearing(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, addr: object) -> None:
            heard.put_nowait(data.decode())

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inlet:
        inlet.bind("\0" + where[1:] if where.startswith("@") else where)
        inlet.setblocking(False)
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Hearing, sock=inlet)
        try:
            yield heard
        finally:
            transport.close()


@pytest.mark.parametrize("abstract", [False, True])
async def test_systemd_hears_of_the_beginning_of_turns_and_of_the_end(tmp_path: Path, abstract: bool) -> None:
    where = f"@penstock-{tmp_path.name}-{os.getpid()}" if abstract else str(tmp_path / "notify")
    async with systemd(where) as heard, asyncio.timeout(20):
        async with service("good", tmp_path / "diary", NOTIFY_SOCKET=where, WATCHDOG_USEC="300000") as running:
            assert [await heard.get() for _ in range(3)] == ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]
            running.process.terminate()
            while (told := await heard.get()) == "WATCHDOG=1":
                pass
            assert told == "STOPPING=1"
            assert await running.ended() == 0


async def test_a_loop_that_hangs_says_nothing_to_systemd(tmp_path: Path) -> None:
    async with systemd(str(tmp_path / "notify")) as heard, asyncio.timeout(20):
        given = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "3000"}
        async with service("hangs", tmp_path / "diary", **given) as running:
            assert [await heard.get() for _ in range(2)] == ["READY=1", "WATCHDOG=1"]
            running.supervisor.close()
            assert await running.ended() == 1, "after the grace of an orphan, hundreds of periods later"
            assert heard.empty()


async def test_a_systemd_that_does_not_listen_holds_nobody_up(tmp_path: Path) -> None:
    async with service("good", tmp_path / "diary", NOTIFY_SOCKET=str(tmp_path / "nobody")) as running:
        await running.ready()
        running.process.terminate()
        assert await running.ended() == 0
