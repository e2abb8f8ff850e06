"""Threads for work that would hold the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from penstock.gateway.completing.seats import Seats
from penstock.runtime.threads import started_threads

Value = TypeVar("Value")

THREAD_FROM = 8192
"""Characters from which a prompt is prepared in a thread: more may hold the event loop for over 5 ms."""
_AT_ONCE = 2
_WORKING = _AT_ONCE + 1
"""Threads for work whose size says how long it takes: a tenant that takes all it may have leaves one."""
_RENDERING = 2 * _AT_ONCE + 1
"""Threads that render prompts of a size: two tenants that take all they may have leave one."""
_LONG_S = 0.5
"""What is long for a short prompt, many times what templates take."""
_VERY_LONG_S = 2.0


@dataclass(frozen=True, slots=True)
class _Room:
    """Threads for prompts of a size, and who may use them."""

    pool: ThreadPoolExecutor
    seats: Seats


class Threads:
    """Separate threads for short and for long work, so that short work never waits for long. Made by `open_threads`."""

    def __init__(self, work: _Room, short: _Room, long: _Room) -> None:
        self._work = work
        self._short_prompts = short
        self._long_prompts = long

    async def run(self, work: Callable[[], Value], size: int, tenant: str) -> Value:
        """Runs `work` here when it is quick, else in a thread, so that the event loop never waits for it. Tenants with
        much work wait for each other as in `render`, and leave others a thread.

        `size` is roughly how many characters it reads, which says how long it takes.
        """
        return work() if size < THREAD_FROM else await _seated(self._work, work, tenant)

    async def render(self, work: Callable[[], Value], size: int, tenant: str) -> Value:
        """Runs `work` in a thread. It renders a model's chat template, which may take long whatever its size: tenants
        whose work does wait for each other, and not others for them. A caller that is cancelled does not wait, but work
        that has begun keeps its thread and its tenant's place until its end."""
        return await _seated(self._short_prompts if size < THREAD_FROM else self._long_prompts, work, tenant)


async def _seated(room: _Room, work: Callable[[], Value], tenant: str) -> Value:
    leave, loop = await room.seats.take(tenant), asyncio.get_running_loop()
    working = room.pool.submit(work)

    def left(_ended: Future[Value]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(leave)

    working.add_done_callback(left)
    return await asyncio.wrap_future(working)


@contextmanager
def open_threads() -> Iterator[Threads]:
    """Threads for the length of the block; work that has not begun by then is dropped."""
    with ExitStack() as stack:

        def opened(name: str, workers: int) -> ThreadPoolExecutor:
            pool = started_threads(workers, name)
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            return pool

        short = _Room(opened("short", _RENDERING), Seats(at_once=_AT_ONCE, long_s=_LONG_S))
        long = _Room(opened("long", _RENDERING), Seats(at_once=_AT_ONCE, long_s=_VERY_LONG_S))
        yield Threads(_Room(opened("work", _WORKING), Seats(at_once=_AT_ONCE, long_s=inf)), short, long)
