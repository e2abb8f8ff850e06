"""What is set for a whole service."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from penstock.runtime.service import share_the_lock

_TURNS = 100


@pytest.fixture
def interval() -> Iterator[None]:
    """The switch interval is as it was, afterwards."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


async def _seconds_of_turns() -> float:
    """Of some turns of the event loop, which sleep for a moment, beside a thread that computes all the time."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(100))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        begin = time.perf_counter()
        for _ in range(_TURNS):
            await asyncio.sleep(1e-4)
        return time.perf_counter() - begin
    finally:
        over.set()
        thread.join()


async def test_a_thread_that_computes_gives_way_to_the_loop(interval: None) -> None:
    sys.setswitchinterval(0.005)
    by_default = await _seconds_of_turns()
    share_the_lock()
    assert await _seconds_of_turns() < by_default / 3
