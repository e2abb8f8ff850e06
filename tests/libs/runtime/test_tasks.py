"""A background task does what was said of its failure, and nothing of it is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import Context, ContextVar

import pytest
from structlog.testing import capture_logs

from penstock.runtime.tasks import Background, being_cancelled, beside, end, first_of, merged, start, within


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


class Source:
    """Yields what it is told to."""

    def __init__(self, *items: object) -> None:
        self._items = items
        self.closed = False

    async def __call__(self) -> AsyncGenerator[object, None]:
        try:
            for item in self._items:
                if isinstance(item, asyncio.Event):
                    await item.wait()
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            self.closed = True


async def test_sources_are_merged_as_they_come() -> None:
    gate = asyncio.Event()
    one, other = Source(1, 2, gate, 5), Source(3, 4)
    found = []
    async for item in merged(one(), other()):
        found.append(item)
        if len(found) == 4:
            gate.set()
    assert found[-1] == 5 and sorted(map(str, found)) == list("12345")
    assert [item for item in found if item in (1, 2, 5)] == [1, 2, 5]
    assert one.closed and other.closed


async def test_an_error_of_a_source_comes_after_its_items_and_closes_the_others() -> None:
    one, other = Source(1, ValueError("mine")), Source(asyncio.Event())
    found = []
    with pytest.raises(ValueError, match="mine"):
        async for item in merged(one(), other()):
            found.append(item)
    assert found == [1] and other.closed


@pytest.mark.parametrize("more", [0, 1])
async def test_leaving_a_merge_closes_every_source(more: int) -> None:
    sources = [Source(1, asyncio.Event()), *(Source(asyncio.Event()) for _ in range(more))]
    async with aclosing(merged(*(source() for source in sources))) as items:
        async for _ in items:
            break
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("more", [0, 1])
async def test_being_cancelled_in_a_merge_closes_every_source(more: int) -> None:
    sources = [Source(asyncio.Event()) for _ in range(1 + more)]

    async def read() -> None:
        async with aclosing(merged(*(source() for source in sources))) as items:
            async for _ in items:
                pass

    task = asyncio.ensure_future(read())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(source.closed for source in sources)


async def test_a_source_that_was_torn_down_is_an_error_and_no_cancellation_of_its_reader() -> None:
    with pytest.raises(asyncio.CancelledError):
        async for _ in merged(Source(asyncio.CancelledError())()):
            pass
    assert not being_cancelled()
