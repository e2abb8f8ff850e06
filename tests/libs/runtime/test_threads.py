"""A thread's job has ended when its caller goes on, whatever happened to the caller."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.runtime.threads import to_its_end


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
