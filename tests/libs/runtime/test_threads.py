"""A thread's job has ended when its caller goes on, whatever happened to the caller."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.runtime.service import start_threads
from penstock.runtime.threads import started_threads, to_its_end


@pytest.fixture
def threads():
    with ThreadPoolExecutor(1) as pool:
        yield pool


async def test_the_result_and_the_error_arrive(threads: ThreadPoolExecutor) -> None:
    assert await to_its_end(threads, lambda: 7) == 7
    with pytest.raises(KeyError):
        await to_its_end(threads, lambda: {}["missing"])


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_caller_waits_for_the_job_that_has_begun(threads: ThreadPoolExecutor, times: int) -> None:
    began, release, ended = threading.Event(), threading.Event(), threading.Event()

    def job() -> None:
        began.set()
        release.wait(10)
        ended.set()

    task = asyncio.create_task(to_its_end(threads, job, stop=release.set if times == 1 else None))
    await asyncio.to_thread(began.wait)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
        assert times == 1 or not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_job_that_has_not_begun_is_dropped(threads: ThreadPoolExecutor) -> None:
    release, ran = threading.Event(), []
    first = asyncio.create_task(to_its_end(threads, lambda: release.wait(10)))
    second = asyncio.create_task(to_its_end(threads, lambda: ran.append(1)))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    release.set()
    await first
    assert not ran


def running(name: str) -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(name)}


def test_threads_run_before_the_first_job() -> None:
    with started_threads(3, "early") as threads:
        before = running("early")
        assert len(before) == 3
        meeting = threading.Barrier(3)
        list(threads.map(lambda _: meeting.wait(10), range(3)))
        assert running("early") == before, "three jobs at once start no other"
    assert not running("early")


def test_threads_that_can_not_all_be_started_end(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def most(thread: threading.Thread) -> None:
        if len(running("few")) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", most)
    with pytest.raises(RuntimeError, match="can't start"):
        started_threads(3, "few")
    for thread in running("few"):
        thread.join(10)
    assert not running("few")


def test_a_service_starts_the_threads_of_its_loop_before_it_is_ready() -> None:
    async def main() -> None:
        start_threads()
        before = running("job")
        meeting = threading.Barrier(len(before))
        await asyncio.gather(*(asyncio.to_thread(meeting.wait, 10) for _ in before))
        assert running("") == before | {threading.main_thread()} | others

    others = running("")
    asyncio.run(main())
    assert running("") == others
