"""An event loop whose time is made up: nobody waits, its clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")


class _NoWaiting(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout=None):
        found = super().select(0)
        if not found and timeout:
            self.now += timeout
        return found


def run(main: Callable[[asyncio.AbstractEventLoop], Awaitable[Result]]) -> Result:
    """What `main(loop)` returns, in such a loop."""
    selector = _NoWaiting()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    try:
        return loop.run_until_complete(main(loop))
    finally:
        loop.close()
