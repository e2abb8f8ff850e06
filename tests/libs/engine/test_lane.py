"""The engine's thread: calls in order, answers and errors to their callers, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from penstock.engine.lane import Lane


async def test_calls_run_in_order_in_one_other_thread():
    seen = []

    def call(number):
        seen.append((number, threading.get_ident()))
        return number * number

    with Lane("test") as lane:
        assert await asyncio.gather(*[lane.call(call, number) for number in range(20)]) == [n * n for n in range(20)]
    assert [number for number, _ in seen] == list(range(20))
    assert len({thread for _, thread in seen}) == 1 and seen[0][1] != threading.get_ident()


async def test_errors_go_to_the_caller_and_the_next_call_runs():
    with Lane("test") as lane:
        with pytest.raises(ZeroDivisionError):
            await lane.call(lambda: 1 / 0)
        assert await lane.call(int, "7") == 7


async def test_leaving_waits_for_what_was_begun_and_a_cancelled_caller_hears_nothing():
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def call():
        begun.set()
        assert go.wait(10)
        done.set()

    with Lane("test") as lane:
        answer = lane.call(call)
        assert begun.wait(10)
        answer.cancel()
        go.set()
    assert done.is_set() and answer.cancelled()
    assert "test" not in [thread.name for thread in threading.enumerate()]
    await asyncio.sleep(0)  # the late answer arrives, and finds nobody


async def test_arguments_do_not_outlive_the_call():
    class Heavy:
        pass

    with Lane("test") as lane:
        one = Heavy()
        gone = weakref.ref(one)
        await lane.call(id, one)
        del one
        await lane.call(int, 1)
        gc.collect()
        assert gone() is None


async def test_begun_is_told_on_the_loop_before_the_answer():
    told, go = asyncio.Event(), threading.Event()
    with Lane("test") as lane:
        answer = lane.call(go.wait, 10, begun=told.set)
        await told.wait()
        assert not answer.done()
        go.set()
        assert await answer
        failed = []
        with pytest.raises(ZeroDivisionError):
            await lane.call(lambda: 1 / 0, begun=lambda: failed.append(threading.get_ident()))
        assert failed == [threading.get_ident()]
