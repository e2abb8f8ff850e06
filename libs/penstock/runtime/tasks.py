"""The only way to run a background task: its starter decides what a failure does.

A task that fails in silence is a defect that shows up hours later somewhere else. Here every failure is logged with
its traceback and counted by the task's name; then it stops the block it runs beside, is started again, or ends there.
Tasks whose failure is an answer for their parent belong in an `asyncio.TaskGroup` instead.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Any, Literal, TypeVar

import structlog

OnFailure = Literal["stop", "restart", "log"]
"""stop: the block that the task runs beside is cancelled and raises the error.
restart: the task is started again after a pause that doubles with each failure in a row.
log: the task has ended; the block goes on without it."""

Failed = Callable[[str], object]
"""Counts the failure of the task with that name: `Metrics.task_failed`."""

Result = TypeVar("Result")
Job = Callable[[], Coroutine[Any, Any, None]]

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0
_LIVED_S = 10.0
"""A task that ran this long before it failed starts again with the first pause."""


class Background:
    """A task that runs beside a block."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._task.done()

    async def ended(self) -> None:
        """Returns when the task has ended by itself; for jobs that are told to end, not cancelled."""
        await asyncio.wait([self._task])


@asynccontextmanager
async def beside(job: Job, *, name: str, on_failure: OnFailure, failed: Failed) -> AsyncIterator[Background]:
    """Runs `job()` for the length of the block, and cancels it at the block's end.

    A job that returns has ended well and is not started again. With "stop" the block is cancelled at its next await,
    and what leaves it is the job's error, not a group around it.
    """
    parent = asyncio.current_task()
    assert parent is not None
    over = told = False

    def stop(task: asyncio.Task[None]) -> None:
        nonlocal told
        if not over and _error(task) is not None:
            told = True
            parent.cancel()

    task = start(job, name=name, on_failure=on_failure, failed=failed)
    task.add_done_callback(stop)
    only_us = False
    try:
        try:
            yield Background(task)
        finally:
            over = True
            only_us = told and parent.uncancel() == 0
            await end(task)
    except asyncio.CancelledError:
        if not only_us:
            raise
    if error := _error(task):
        raise error


def start(job: Job, *, name: str, on_failure: OnFailure, failed: Failed) -> asyncio.Task[None]:
    """Runs `job()` until its owner calls `end`; for a task that outlives the call that starts it.

    The task raises only with "stop"; its owner then has to look at the task.
    """
    return asyncio.get_running_loop().create_task(_run(job, name, on_failure, failed), name=name)


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancels the tasks and returns when all have ended, whatever they raise. Being cancelled meanwhile is not lost."""
    for task in tasks:
        task.cancel()
    cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            cancelled = True
    for task in tasks:
        _error(task)  # marks it as seen: it was logged where it happened
    if cancelled:
        raise asyncio.CancelledError


def _error(task: asyncio.Task[Any]) -> BaseException | None:
    """The error of a task that has ended, or None."""
    return None if task.cancelled() else task.exception()


async def _run(job: Job, name: str, on_failure: OnFailure, failed: Failed) -> None:
    loop = asyncio.get_running_loop()
    log = structlog.get_logger("penstock.tasks")
    pause = _FIRST_PAUSE_S
    while True:
        began = loop.time()
        try:
            await job()
            return
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            error: Exception = RuntimeError(f"{name} was cancelled by something it awaited")
        except Exception as caught:
            error = caught
        failed(name)
        log.error("background task failed", task=name, then=on_failure, exc_info=error)
        if on_failure == "stop":
            raise error
        if on_failure == "log":
            return
        if loop.time() - began >= _LIVED_S:
            pause = _FIRST_PAUSE_S
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def being_cancelled() -> bool:
    """Whether the current task is asked to end, or only something it awaited was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def within(context: Context, job: Coroutine[Any, Any, Result]) -> Result:
    """Awaits `job` in a context that is not the caller's: the id and trace of the request that it works for."""
    return await asyncio.get_running_loop().create_task(job, context=context)


async def first_of(*jobs: Coroutine[Any, Any, Result]) -> list[Result | None]:
    """Runs the jobs until one ends, then cancels the others; the results in order, None for those cancelled.

    An error of the first raises. Two may end in the same turn of the loop: both results count then.
    """
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done = [task.done() for task in tasks]
    finally:
        await end(*tasks)
    return [task.result() if ended else None for task, ended in zip(tasks, done, strict=True)]


@asynccontextmanager
async def alongside(
    *jobs: Coroutine[Any, Any, None], over: Callable[[BaseException | None], object]
) -> AsyncIterator[None]:
    """Runs the jobs for the length of the block; those that still run at its end are cancelled. `over` hears at most
    once, within the block: of the first error of a job, or of None when all have returned."""
    left, told = len(jobs), False

    def ended(task: asyncio.Task[None]) -> None:
        nonlocal left, told
        left -= 1
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if not told and (error is not None or left == 0):
            told = True
            over(error)

    tasks = [asyncio.get_running_loop().create_task(job) for job in jobs]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        yield
    finally:
        told = True
        await end(*tasks)
