"""Processes that are forked from one that has done their imports."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.services.cli.helpers import ENVIRONMENT, Onlooker, alive, fake

from penstock.cli.child import ChildSpec, running
from penstock.cli.forking import UNKNOWN_CODE, NoZygote, Zygote, prepared
from penstock.cli.supervisor import ChildState, Patience, supervised

MODULE = "tests.services.cli.fake_service"
QUICK = Patience(stop_s=0.5, first_backoff_s=0.05, last_backoff_s=0.1)


def forked(name: str, behaviour: str = "", diary: Path | None = None) -> ChildSpec:
    spec = fake(name, behaviour, diary)
    return replace(spec, command=(sys.executable, "-m", MODULE, *spec.command[2:]), imports="penstock.rpc.server")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while alive(pid):
            await asyncio.sleep(0)


async def test_a_forked_child_lives_like_any_other(tmp_path: Path) -> None:
    """Its arguments, lines, message, regular end; and `ps` shows what it is."""
    seen, diary = Onlooker(), tmp_path / "diary"
    async with supervised([forked("a", "chatty", diary), fake("b")], seen.change, seen.line) as supervisor:
        values = await supervisor.ready()
        pids = supervisor.pids()
        title = command_line(pids["a"])
        zygote = parent(pids["a"])
        assert zygote != os.getpid() == parent(pids["b"])
        assert os.getsid(pids["a"]) == pids["a"]
    assert values["a"] == {"address": "127.0.0.1:1", "name": "a"}
    assert f"-m {MODULE} a chatty" in title
    assert any("mind the gap" in line for name, line in seen.lines if name == "a")
    assert diary.read_text().split() == ["a"]
    assert not any(alive(pid) for pid in (*pids.values(), zygote))


async def test_a_broken_one_says_why() -> None:
    seen = Onlooker()
    async with prepared(["penstock.rpc.server"], ENVIRONMENT) as zygote:
        async with running(forked("a", "broken"), lambda _: None, seen.line, zygote) as child:
            assert await child.ended() == 3
            await seen.until(lambda: any("no such model" in line for _, line in seen.lines))


async def test_one_that_dies_comes_back_from_the_same_zygote() -> None:
    seen = Onlooker()
    async with supervised([forked("a")], seen.change, seen.line, QUICK) as supervisor:
        await supervisor.ready()
        before = supervisor.pids()["a"]
        zygote = parent(before)
        os.kill(before, signal.SIGKILL)
        await seen.until(lambda: seen.count("a", ChildState.READY) == 2)
        assert parent(supervisor.pids()["a"]) == zygote
    assert [change.exit_code for change in seen.changes if change.state is ChildState.DOWN] == [-signal.SIGKILL]


async def test_a_zygote_that_dies_takes_nobody_with_it_and_is_replaced() -> None:
    seen = Onlooker()
    async with supervised([forked("a"), forked("b")], seen.change, seen.line, QUICK) as supervisor:
        await supervisor.ready()
        before = supervisor.pids()
        zygote = parent(before["a"])
        os.kill(zygote, signal.SIGKILL)
        await until_gone(zygote)
        os.kill(before["a"], signal.SIGKILL)
        await seen.until(lambda: seen.count("a", ChildState.READY) == 2)
        after = supervisor.pids()
        assert after["b"] == before["b"] and alive(after["b"])
        assert parent(after["a"]) not in (zygote, os.getpid())
    assert [change.exit_code for change in seen.changes if change.state is ChildState.DOWN] == [UNKNOWN_CODE]
    assert not any(alive(pid) for pid in (*before.values(), *after.values()))


async def test_without_a_zygote_a_child_is_started_as_usual() -> None:
    seen = Onlooker()
    lost = replace(forked("a"), imports="no_such_module")
    async with supervised([lost], seen.change, seen.line) as supervisor:
        await supervisor.ready()
        assert parent(supervisor.pids()["a"]) == os.getpid()
    assert any("could not be forked" in line and "warning" in line for _, line in seen.lines), "and it is said"


async def test_settings_that_no_message_holds_are_not_sent() -> None:
    async with prepared(["penstock.rpc.server"], ENVIRONMENT) as zygote:
        with pytest.raises(NoZygote, match="more than the 65536"):
            await zygote.fork(MODULE, ["x" * 70_000], {}, (1, 1))
        assert zygote.pid is None


async def test_a_fork_that_nobody_waits_for_leaves_no_process() -> None:
    """Cancelled before the answer: the process is killed as soon as it is known, and the next fork gets its own."""
    readers: list[int] = []
    with ExitStack() as stack:

        async def fork(zygote: Zygote, number: int) -> int:
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)  # open to the end: what ends before was killed
            lines, its_lines = os.pipe()
            stack.callback(os.close, lines)
            readers.append(lines)
            try:
                with theirs:
                    fds = its_lines, theirs.fileno()
                    return (await zygote.fork(MODULE, [f"n{number}", "slow"], ENVIRONMENT, fds)).pid
            finally:
                os.close(its_lines)

        async with prepared(["penstock.rpc.server"], ENVIRONMENT) as zygote:
            first = await fork(zygote, 0)
            job = asyncio.ensure_future(fork(zygote, 1))
            while not zygote.forking:
                await asyncio.sleep(0)
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job
            third = await fork(zygote, 2)
            await end_of_file(readers[1])
            assert " n0 " in command_line(first) and " n2 " in command_line(third)
            for pid in (first, third):
                os.killpg(pid, signal.SIGKILL)
                await until_gone(pid)


async def end_of_file(pipe: int) -> None:
    """Returns when nobody can write to it any more."""
    async with asyncio.timeout(30):
        while await asyncio.to_thread(os.read, pipe, 4096):
            pass
