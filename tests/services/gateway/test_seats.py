"""Who gets a thread for work that may take long: no tenant has all, and those who take long share one place."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack

from penstock.gateway.completing.seats import Seats
from penstock.gateway.completing.threads import THREAD_FROM, open_threads


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def sits(seats: Seats, tenant: str, places: ExitStack) -> bool:
    """Whether the tenant gets a place at once, which it keeps."""
    entering = asyncio.ensure_future(seats.take(tenant))
    for _ in range(10):
        await asyncio.sleep(0)
    if not entering.done():
        entering.cancel()
        await asyncio.wait([entering])
        return False
    places.callback(entering.result())
    return True


async def took(seats: Seats, clock: Clock, tenant: str, seconds: float) -> None:
    leave = await seats.take(tenant)
    clock.now += seconds
    leave()


async def test_a_tenant_has_two_places_and_another_its_own():
    seats = Seats(at_once=2, long_s=1.0, clock=Clock())
    with ExitStack() as places:
        assert [await sits(seats, tenant, places) for tenant in "aaab"] == [True, True, False, True]
    with ExitStack() as places:
        assert await sits(seats, "a", places), "a place that was given back, and one that nobody waited for any more"


async def test_those_who_took_long_share_one_place_for_a_while():
    clock = Clock()
    seats = Seats(at_once=2, long_s=1.0, clock=clock)
    for tenant in "ab":
        await took(seats, clock, tenant, 1.5)
    await took(seats, clock, "c", 0.5)
    with ExitStack() as places:
        assert [await sits(seats, tenant, places) for tenant in "abcc"] == [True, False, True, True]
    clock.now += 60
    with ExitStack() as places:
        assert [await sits(seats, tenant, places) for tenant in "aab"] == [True, True, True]


async def test_who_waits_in_line_when_it_is_found_slow_is_slow_as_well():
    clock = Clock()
    seats = Seats(at_once=1, long_s=1.0, clock=clock)
    await took(seats, clock, "other", 2)
    with ExitStack() as first:
        assert await sits(seats, "a", first)
        waiting = asyncio.ensure_future(took(seats, clock, "a", 0))
        with ExitStack() as slow:
            assert await sits(seats, "other", slow)
            clock.now += 2
            first.close()
            for _ in range(10):
                await asyncio.sleep(0)
            assert not waiting.done(), "the one place of the slow is taken"
        await waiting


async def test_work_that_nobody_waits_for_keeps_its_place_until_its_end():
    """Else a tenant that leaves again and again would have all threads."""
    go, begun = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        begun.release()
        go.wait(20)

    with open_threads() as threads:
        left = [asyncio.ensure_future(threads.render(work, 10, "a")) for _ in range(2)]
        for _ in left:
            assert await asyncio.to_thread(begun.acquire, timeout=10)
        for one in left:
            one.cancel()
        await asyncio.wait(left)
        again = asyncio.ensure_future(threads.render(lambda: "a", 10, "a"))
        assert await threads.render(lambda: "b", 10, "b") == "b", "others have theirs"
        assert not again.done()
        go.set()
        async with asyncio.timeout(10):
            assert await again == "a"


async def test_a_tenant_with_many_large_bodies_leaves_another_a_thread():
    """And gets no more than its own, in its own line."""
    go, begun = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        begun.release()
        go.wait(20)

    with open_threads() as threads:
        many = [asyncio.ensure_future(threads.run(work, THREAD_FROM, "a")) for _ in range(20)]
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=10)
        async with asyncio.timeout(10):
            for _ in range(20):
                assert await threads.run(lambda: "b", THREAD_FROM, "b") == "b"
        assert not any(one.done() for one in many) and not begun.acquire(blocking=False)
        go.set()
        await asyncio.gather(*many)
