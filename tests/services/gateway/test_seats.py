"""Who gets a thread for work that may take long: no tenant has all, and those who take long share one place."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from penstock.gateway.completing.seats import Seats


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def sits(seats: Seats, tenant: str, places: AsyncExitStack) -> bool:
    """Whether the tenant gets a place at once, which it keeps."""
    entering = asyncio.ensure_future(places.enter_async_context(seats.one(tenant)))
    for _ in range(10):
        await asyncio.sleep(0)
    if not entering.done():
        entering.cancel()
        await asyncio.wait([entering])
    return not entering.cancelled()


async def took(seats: Seats, clock: Clock, tenant: str, seconds: float) -> None:
    async with seats.one(tenant):
        clock.now += seconds


async def test_a_tenant_has_two_places_and_another_its_own():
    seats = Seats(at_once=2, long_s=1.0, clock=Clock())
    async with AsyncExitStack() as places:
        assert [await sits(seats, tenant, places) for tenant in "aaab"] == [True, True, False, True]
    async with AsyncExitStack() as places:
        assert await sits(seats, "a", places), "a place that was given back, and one that nobody waited for any more"


async def test_those_who_took_long_share_one_place_for_a_while():
    clock = Clock()
    seats = Seats(at_once=2, long_s=1.0, clock=clock)
    for tenant in "ab":
        await took(seats, clock, tenant, 1.5)
    await took(seats, clock, "c", 0.5)
    async with AsyncExitStack() as places:
        assert [await sits(seats, tenant, places) for tenant in "abcc"] == [True, False, True, True]
    clock.now += 60
    async with AsyncExitStack() as places:
        assert [await sits(seats, tenant, places) for tenant in "aab"] == [True, True, True]


async def test_who_waits_in_line_when_it_is_found_slow_is_slow_as_well():
    clock = Clock()
    seats = Seats(at_once=1, long_s=1.0, clock=clock)
    await took(seats, clock, "other", 2)
    async with AsyncExitStack() as first:
        assert await sits(seats, "a", first)
        waiting = asyncio.ensure_future(took(seats, clock, "a", 0))
        async with AsyncExitStack() as slow:
            assert await sits(seats, "other", slow)
            clock.now += 2
            await first.aclose()
            for _ in range(10):
                await asyncio.sleep(0)
            assert not waiting.done(), "the one place of the slow is taken"
        await waiting
