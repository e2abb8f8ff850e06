"""Jobs in threads, from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

Result = TypeVar("Result")


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
