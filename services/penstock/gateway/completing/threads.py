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
    """Separate threads for short and for long work, so that short work never waits for long. Made by `open_threads`."""

    def __init__(self, short: ThreadPoolExecutor, long: ThreadPoolExecutor) -> None:
        self._short = short
        self._long = long

    async def run(self, work: Callable[[], Value], size: int, *, bounded: bool = True) -> Value:
        """Runs `work` here when it is quick, else in a thread, so that the event loop never waits for it.

        `size` is roughly how many characters it reads; `bounded` is whether that says how long it takes. It does not
        where a model's chat template is rendered.
        """
        if size < THREAD_FROM and bounded:
            return work()
        pool = self._short if size < THREAD_FROM else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work)


@contextmanager
def open_threads() -> Iterator[Threads]:
    """Threads for the length of the block; work that has not begun by then is dropped."""
    short = ThreadPoolExecutor(max_workers=2, thread_name_prefix="short")
    long = ThreadPoolExecutor(max_workers=2, thread_name_prefix="long")
    try:
        yield Threads(short, long)
    finally:
        short.shutdown(wait=False, cancel_futures=True)
        long.shutdown(wait=False, cancel_futures=True)
