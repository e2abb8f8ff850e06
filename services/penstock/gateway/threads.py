"""Threads for work that would hold the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Value = TypeVar("Value")

THREAD_FROM = 8192
"""Characters from which a prompt is prepared in a thread: more may hold the event loop for over 5 ms."""


class Threads:
    """A few threads; made by `open_threads`."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    async def run(self, work: Callable[[], Value], size: int) -> Value:
        """Runs `work` here when it is quick, else in a thread, so that the event loop never waits for it.

        `size` is about how many characters it reads.
        """
        if size < THREAD_FROM:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


@contextmanager
def open_threads() -> Iterator[Threads]:
    """Threads for the length of the block; work that has not begun by then is dropped."""
    pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="prepare")
    try:
        yield Threads(pool)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
