"""What files are touched by runs to its end, also when nobody waits for it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any


async def finished(future: Future[Any]) -> bool:
    """Returns when a job of a thread is over, or will never begin; whether somebody cancelled the caller meanwhile."""
    interrupted, over = False, asyncio.Event()
    loop = asyncio.get_running_loop()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(over.set))
    while not future.done():
        try:
            await over.wait()
        except asyncio.CancelledError:
            interrupted = True
            future.cancel()
    return interrupted


async def whole(job: Coroutine[Any, Any, None]) -> None:
    """Runs a job of files to its end, also when cancelled meanwhile: half done it would leave them open."""
    task = asyncio.ensure_future(job)
    try:
        await asyncio.shield(task)
    finally:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
