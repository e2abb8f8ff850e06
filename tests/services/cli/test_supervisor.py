"""The supervisor, with tiny fake services."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.services.cli.helpers import ENVIRONMENT, REPOSITORY, Onlooker, alive, fake

from penstock.cli.child import ChildSpec
from penstock.cli.supervisor import ChildFailed, ChildState, Patience, supervised

QUICK = Patience(stop_s=0.5, first_backoff_s=0.05, last_backoff_s=0.1)


async def test_ready_has_what_each_child_said_and_nothing_is_left() -> None:
    seen = Onlooker()
    async with supervised([fake("a"), fake("b")], seen.change, seen.line) as supervisor:
        values = await supervisor.ready()
        pids = supervisor.pids()
    assert values["a"] == {"address": "127.0.0.1:1", "name": "a"}
    assert set(values) == set(pids) == {"a", "b"}
    assert not any(alive(pid) for pid in pids.values())
    assert [seen.count(name, ChildState.STOPPED) for name in "ab"] == [1, 1]


async def test_children_stop_stage_by_stage(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    seen = Onlooker()
    specs = [fake("last", "", diary, 2), fake("first", "", diary, 0), fake("second", "", diary, 1)]
    async with supervised(specs, seen.change, seen.line) as supervisor:
        await supervisor.ready()
    assert diary.read_text().split() == ["first", "second", "last"]


async def test_a_broken_child_ends_the_start_with_its_words(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    seen = Onlooker()
    with pytest.raises(ChildFailed) as caught:
        async with supervised([fake("good", "", diary), fake("bad", "broken")], seen.change, seen.line) as supervisor:
            pids = supervisor.pids()
            await supervisor.ready()
    assert (caught.value.name, caught.value.exit_code) == ("bad", 3)
    assert "no such model" in caught.value.tail[-1]
    assert not any(alive(pid) for pid in pids.values())


async def test_a_child_that_dies_comes_back() -> None:
    seen = Onlooker()
    async with supervised([fake("a"), fake("b")], seen.change, seen.line, QUICK) as supervisor:
        await supervisor.ready()
        for round_ in (2, 3, 4):
            before = supervisor.pids()
            os.kill(before["a"], signal.SIGKILL)
            await seen.until(lambda round_=round_: seen.count("a", ChildState.READY) == round_)
            assert supervisor.pids()["a"] != before["a"]
            assert supervisor.pids()["b"] == before["b"]
    downs = [change for change in seen.changes if change.state is ChildState.DOWN]
    assert [(change.name, change.exit_code, change.back_in_s) for change in downs] == [
        ("a", -9, 0.0),
        ("a", -9, 0.05),
        ("a", -9, 0.1),
    ]


async def test_a_child_that_hangs_is_killed() -> None:
    seen = Onlooker()
    async with supervised([fake("a", "hung")], seen.change, seen.line, QUICK) as supervisor:
        await supervisor.ready()
        pid = supervisor.pids()["a"]
    assert not alive(pid)
    assert [change.state.value for change in seen.changes][2:] == ["stopping", "unstopped", "stopped"]


async def test_a_child_that_stops_answering_is_killed_and_comes_back() -> None:
    """A stopped process neither ends nor answers; its neighbour answers, and is left alone."""
    seen = Onlooker()
    patience = Patience(first_backoff_s=0.05, hung_s=3.0)
    async with supervised([fake("a", "grpc"), fake("b", "grpc")], seen.change, seen.line, patience) as supervisor:
        await supervisor.ready()
        before = supervisor.pids()
        os.kill(before["a"], signal.SIGSTOP)
        await seen.until(lambda: seen.count("a", ChildState.READY) == 2)
        after = supervisor.pids()
    assert [change.state.value for change in seen.changes if change.name == "a"] == [
        *("starting", "ready", "hung", "down", "starting", "ready", "stopped")
    ]
    assert after["a"] != before["a"]
    assert after["b"] == before["b"]
    assert not any(alive(pid) for pid in (*before.values(), *after.values()))


async def test_a_child_that_stays_stuck_is_killed_and_comes_back() -> None:
    """It answers each health check, so it is not hung; its neighbour, which takes no requests and is live, as one that
    drains or waits for others, is left alone."""
    seen = Onlooker()
    patience = Patience(first_backoff_s=0.05, hung_s=20.0, stuck_s=0.6)
    children = [fake("a", "stuck"), fake("b", "unavailable")]
    async with supervised(children, seen.change, seen.line, patience) as supervisor:
        await supervisor.ready()
        before = supervisor.pids()
        for round_ in (2, 3):
            await seen.until(lambda round_=round_: seen.count("a", ChildState.READY) == round_)
        after = supervisor.pids()
    states = [change.state.value for change in seen.changes if change.name == "a"]
    assert states[:10] == ["starting", "ready", "stuck", "down"] * 2 + ["starting", "ready"]
    assert [change.state.value for change in seen.changes if change.name == "b"] == ["starting", "ready", "stopped"]
    assert after["a"] != before["a"] and after["b"] == before["b"]
    assert not any(alive(pid) for pid in (*before.values(), *after.values()))


async def test_a_child_for_which_there_is_no_process_now_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its neighbours go on."""
    seen, start = Onlooker(), asyncio.create_subprocess_exec
    refusals = [BlockingIOError(errno.EAGAIN, "no process")] * 2

    async def refused(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        if refusals:
            raise refusals.pop()
        return await start(*arguments, **options)

    async with supervised([fake("a"), fake("b")], seen.change, seen.line, QUICK) as supervisor:
        await supervisor.ready()
        before = supervisor.pids()
        monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)
        os.kill(before["a"], signal.SIGKILL)
        await seen.until(lambda: seen.count("a", ChildState.READY) == 2)
        assert supervisor.pids()["b"] == before["b"] and not refusals
    downs = [change for change in seen.changes if change.state is ChildState.DOWN]
    assert [change.exit_code for change in downs] == [-9, os.EX_OSERR, os.EX_OSERR]
    assert "could not be started: [Errno 11] no process" in downs[1].tail[0]


async def test_a_child_that_cannot_be_started_ends_the_supervisor() -> None:
    seen = Onlooker()
    with pytest.raises(FileNotFoundError):
        async with supervised([ChildSpec("a", ("/no/such/program",)), fake("b")], seen.change, seen.line) as supervisor:
            await supervisor.ready()
    assert seen.count("a", ChildState.READY) == 0


async def test_stopping_while_starting() -> None:
    seen = Onlooker()
    async with supervised([fake("a", "slow")], seen.change, seen.line) as supervisor:
        await seen.until(lambda: ("a", "thinking") in seen.lines)
        pid = supervisor.pids()["a"]
    assert not alive(pid)


async def test_kill_ends_all_at_once() -> None:
    seen = Onlooker()
    async with supervised([fake("a", "hung"), fake("b")], seen.change, seen.line) as supervisor:
        await supervisor.ready()
        pids = supervisor.pids()
        supervisor.kill()
    assert not any(alive(pid) for pid in pids.values())


async def test_cancelling_the_block_stops_the_children() -> None:
    seen = Onlooker()
    pids: dict[str, int] = {}
    ready = asyncio.Event()

    async def body() -> None:
        async with supervised([fake("a")], seen.change, seen.line) as supervisor:
            await supervisor.ready()
            pids.update(supervisor.pids())
            ready.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await ready.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pids
    assert not any(alive(pid) for pid in pids.values())


async def test_long_lines_pass_in_pieces() -> None:
    seen = Onlooker()
    async with supervised([fake("a", "chatty")], seen.change, seen.line) as supervisor:
        await supervisor.ready()
        await seen.until(lambda: any("mind the gap" in line for _, line in seen.lines))
    assert sum(line.count("x") for _, line in seen.lines) >= 100_000


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_children_do_not_outlive_their_supervisor(end: signal.Signals) -> None:
    script = REPOSITORY / "tests" / "services" / "cli" / "lonely_supervisor.py"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), "", "hung", ""),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT},
    )
    assert process.stdout is not None
    pids = json.loads(await process.stdout.readline())
    children = [psutil.Process(pid) for pid in pids.values()]
    process.send_signal(end)
    await process.wait()
    _, left = await asyncio.to_thread(psutil.wait_procs, children, 10)
    assert left == []
