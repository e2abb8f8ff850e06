"""A background task does what was said of its failure, and nothing of it is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextvars import Context, ContextVar

import pytest
from structlog.testing import capture_logs

from penstock.runtime.tasks import Background, alongside, being_cancelled, beside, end, first_of, start, within


class Job:
    """Fails `failures` times, then runs until it is cancelled."""

    def __init__(self, failures: int = 0) -> None:
        self.left = failures
        self.runs = 0
        self.running = asyncio.Event()
        self.cancelled = False

    async def __call__(self) -> None:
        self.runs += 1
        if self.left:
            self.left -= 1
            raise ValueError("the job's own error")
        self.running.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled = True


async def test_a_job_ends_with_its_block() -> None:
    job = Job()
    async with beside(job, name="job", on_failure="stop", failed=print) as running:
        await job.running.wait()
        assert running.running
    assert job.cancelled and not running.running


async def test_stop_raises_the_error_itself_out_of_the_block() -> None:
    failed: Counter[str] = Counter()
    with pytest.raises(ValueError, match="own error"):
        async with beside(Job(1), name="job", on_failure="stop", failed=lambda name: failed.update([name])):
            await asyncio.Event().wait()
    assert failed == {"job": 1}
    await asyncio.sleep(0)  # nothing of the cancellation is left for the caller


async def test_stop_reaches_a_block_that_ends_in_the_same_turn() -> None:
    failing = asyncio.Event()

    async def job() -> None:
        await failing.wait()
        raise ValueError("at the last moment")

    with pytest.raises(ValueError, match="last moment"):
        async with beside(job, name="job", on_failure="stop", failed=print):
            await asyncio.sleep(0)
            failing.set()
            await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_the_caller_s_cancellation_wins_over_stop() -> None:
    both = asyncio.Event()

    async def job() -> None:
        await both.wait()
        raise ValueError("too")

    async def caller() -> None:
        async with beside(job, name="job", on_failure="stop", failed=print):
            await asyncio.Event().wait()

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    both.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_block_stays_what_it_is() -> None:
    with pytest.raises(KeyError):
        async with beside(Job(), name="job", on_failure="stop", failed=print):
            raise KeyError("of the block")


async def test_restart_counts_logs_and_runs_again() -> None:
    failed: Counter[str] = Counter()
    job = Job(3)
    with capture_logs() as lines:
        async with beside(job, name="job", on_failure="restart", failed=lambda name: failed.update([name])):
            await job.running.wait()
    assert (job.runs, failed["job"]) == (4, 3)
    assert [(line["task"], line["then"], line["log_level"]) for line in lines] == [("job", "restart", "error")] * 3


async def test_log_ends_the_task_and_the_block_goes_on() -> None:
    failed: Counter[str] = Counter()
    job = Job(1)
    with capture_logs() as lines:
        async with beside(job, name="job", on_failure="log", failed=lambda name: failed.update([name])) as running:
            await running.ended()
    assert (job.runs, failed["job"], len(lines)) == (1, 1, 1)


async def test_a_job_that_returns_is_not_started_again() -> None:
    runs = []

    async def job() -> None:
        runs.append(1)

    async with beside(job, name="job", on_failure="restart", failed=print) as running:
        await running.ended()
    assert len(runs) == 1


async def test_cancelled_by_what_it_awaits_is_a_failure() -> None:
    failed: Counter[str] = Counter()

    async def job() -> None:
        inner: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        inner.cancel()
        await inner

    with pytest.raises(RuntimeError, match="cancelled by something it awaited"):
        async with beside(job, name="job", on_failure="stop", failed=lambda name: failed.update([name])):
            await asyncio.Event().wait()
    assert failed == {"job": 1}


async def test_end_waits_for_all_also_when_cancelled_itself() -> None:
    release, ended = asyncio.Event(), []

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await release.wait()
            ended.append(1)

    task = start(slow, name="slow", on_failure="log", failed=print)
    await asyncio.sleep(0)
    ending = asyncio.create_task(end(task))
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.sleep(0)
    assert not ended
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert ended


async def test_first_of_gives_the_result_and_ends_the_others() -> None:
    job = Job()

    async def quick() -> str:
        await job.running.wait()
        return "quick"

    assert await first_of(job(), quick()) == [None, "quick"]
    assert job.cancelled


async def test_first_of_raises_the_error_of_the_first() -> None:
    job = Job()
    with pytest.raises(ValueError):
        await first_of(Job(1)(), job())


async def test_being_cancelled_tells_ones_own_end_from_another_s() -> None:
    seen: list[bool] = []

    async def body(cancelled: asyncio.Future[None]) -> None:
        try:
            await cancelled
        except asyncio.CancelledError:
            seen.append(being_cancelled())

    inner: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(body(inner))
    await asyncio.sleep(0)
    inner.cancel()
    await task
    task = asyncio.create_task(body(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)
    task.cancel()
    await task
    assert seen == [False, True]


def test_background_says_when_it_runs() -> None:
    async def main() -> tuple[bool, bool]:
        task = start(Job(), name="job", on_failure="log", failed=print)
        background = Background(task)
        before = background.running
        await end(task)
        return before, background.running

    assert asyncio.run(main()) == (True, False)


def test_a_job_within_another_context_sees_its_values_and_is_cancelled_with_its_caller() -> None:
    name = ContextVar("name", default="caller's")
    theirs = Context()
    theirs.run(name.set, "theirs")
    ended = []

    async def job() -> str:
        return name.get()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name.get())

    async def main() -> tuple[str, str]:
        seen = await within(theirs, job()), name.get()
        caller = asyncio.create_task(within(theirs, endless()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await end(caller)
        return seen

    assert asyncio.run(main()) == ("theirs", "caller's")
    assert ended == ["theirs"]


class Jobs:
    """Jobs beside a block, and what is heard of them."""

    def __init__(self) -> None:
        self.heard: list[BaseException | None] = []
        self.closed = 0

    async def job(self, *steps: asyncio.Event | BaseException) -> None:
        try:
            for step in steps:
                if isinstance(step, BaseException):
                    raise step
                await step.wait()
        finally:
            self.closed += 1

    async def told(self) -> None:
        async with asyncio.timeout(1):
            while not self.heard:
                await asyncio.sleep(0)


async def test_the_end_of_all_jobs_is_told_once() -> None:
    jobs, gate = Jobs(), asyncio.Event()
    async with alongside(jobs.job(), jobs.job(gate), over=jobs.heard.append):
        await asyncio.sleep(0.01)
        assert not jobs.heard
        gate.set()
        await jobs.told()
    assert jobs.heard == [None] and jobs.closed == 2


async def test_the_first_error_of_a_job_is_told_at_once() -> None:
    jobs, error = Jobs(), ValueError("mine")
    async with alongside(jobs.job(asyncio.Event()), jobs.job(error), jobs.job(error), over=jobs.heard.append):
        await jobs.told()
    assert jobs.heard == [error] and jobs.closed == 3


async def test_leaving_the_block_ends_the_jobs_and_tells_nothing() -> None:
    jobs = Jobs()

    async def block() -> None:
        async with alongside(jobs.job(asyncio.Event()), jobs.job(asyncio.Event()), over=jobs.heard.append):
            await asyncio.Event().wait()

    with pytest.raises(KeyError):
        async with alongside(jobs.job(asyncio.Event()), over=jobs.heard.append):
            await asyncio.sleep(0)
            raise KeyError
    running = asyncio.ensure_future(block())
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (jobs.heard, jobs.closed) == ([], 3)


async def test_a_job_that_was_torn_down_is_told_and_no_cancellation_of_its_parent() -> None:
    jobs = Jobs()
    async with alongside(jobs.job(asyncio.CancelledError()), over=jobs.heard.append):
        await jobs.told()
    assert isinstance(jobs.heard[0], asyncio.CancelledError) and not being_cancelled()
