"""Jobs in threads, from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

Result = TypeVar("Result")


def started_threads(count: int, name: str) -> ThreadPoolExecutor:
    """An executor whose threads run already, for an event loop. The caller shuts it down.

    Others start a thread with each of their first jobs. Whoever starts one waits until it runs, which on a busy machine
    takes longer than a loop may be held; so this waits before, where nobody is served yet.
    """
    threads = ThreadPoolExecutor(count, name)
    all_run = Barrier(count)  # before that no thread is idle, so each job starts one
    try:
        for _ in range(count):
            threads.submit(all_run.wait)
    except BaseException:
        all_run.abort()
        threads.shutdown(wait=False)
        raise
    return threads


async def to_its_end(
    executor: Executor, job: Callable[[], Result], *, stop: Callable[[], object] | None = None
) -> Result:
    """Runs `job` in a thread of `executor` and returns its result.

    A thread cannot be cancelled: when the caller is, `stop` is called (it may tell the job to end early), a job that
    has not begun is dropped, and CancelledError is raised only after a job that has begun has ended. So whatever
    memory the job touches is the caller's again when this returns. The job's own error is lost then.
    """
    submitted = executor.submit(job)
    running = asyncio.wrap_future(submitted)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if running.done() and not running.cancelled():
            raise
        if stop is not None:
            stop()
        while not submitted.cancel() and not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue
        if running.done() and not running.cancelled():
            running.exception()  # marks it as seen
        raise
