"""Hand-offs: what a decode worker needs of a prefill that runs, or has just run, here.

A hand-off is named by (request id, epoch of the plan, proof of the plan). The gateway calls Prefill and Decode at the
same time, so either side may come first; it waits a bounded time for the other. An entry holds at most one block of
bytes and disappears when it is taken, or `keep_s` after the prefill has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.engine.request import TokenOut
from penstock.errors import NotFound
from penstock.worker.publishing import BlockSink

Name = tuple[str, int, bytes]
"""With the `mac` of the prefill worker's capability: only who was told it gets the hand-off."""


@dataclass
class HandoffEntry:
    """One hand-off; `sink.changed` is set whenever any of it changes."""

    sink: BlockSink
    token: TokenOut | None = None
    token_at: float = 0.0
    """When it was sampled, on the monotonic clock."""
    failed: bool = False

    def finish(self, token: TokenOut) -> None:
        """The first token is sampled."""
        self.token, self.token_at = token, time.monotonic()
        self.sink.changed.set()

    def fail(self) -> None:
        """There will be no token."""
        self.failed = True
        self.sink.changed.set()

    async def news(self, patience_s: float) -> bool:
        """Waits for a change. Once the token is there only the store can be slow: False after `patience_s`."""
        try:
            async with asyncio.timeout(patience_s if self.token is not None else None):
                await self.sink.changed.wait()
        except TimeoutError:
            return False
        return True

    @property
    def ready(self) -> bool:
        """Nothing more will change."""
        return self.failed or (self.token is not None and self.sink.settled)


class Handoffs:
    """Owner of all entries of a prefill worker."""

    def __init__(self, wait_s: float, keep_s: float) -> None:
        self._wait_s = wait_s
        self._keep_s = keep_s
        self._entries: dict[Name, asyncio.Future[HandoffEntry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def offer(self, name: Name, sink: BlockSink) -> Iterator[HandoffEntry]:
        """An entry that fails unless it was finished when the block ends. It takes the place of one that nobody has
        taken: a stream of plans that begins anew counts its epochs anew."""
        entry = HandoffEntry(sink)
        if (waiter := self._waiter(name)).done():
            del self._entries[name]
            waiter = self._waiter(name)
        waiter.set_result(entry)
        try:
            yield entry
        finally:
            if entry.token is None:
                entry.fail()
            asyncio.get_running_loop().call_later(self._keep_s, self._drop, name, waiter)

    async def take(self, name: Name) -> HandoffEntry:
        """The entry of that name, for its only reader. Raises NotFound when no prefill offers it in time."""
        waiter = self._waiter(name)
        try:
            async with asyncio.timeout(self._wait_s):
                return await asyncio.shield(waiter)
        except TimeoutError:
            raise NotFound(f"no prefill of request {name[0]!r}, epoch {name[1]}, runs here") from None
        finally:
            if waiter.done():
                self._drop(name, waiter)
            else:
                self._entries.pop(name, None)

    def _waiter(self, name: Name) -> asyncio.Future[HandoffEntry]:
        waiter = self._entries.get(name)
        if waiter is None:
            waiter = self._entries[name] = asyncio.get_running_loop().create_future()
        return waiter

    def _drop(self, name: Name, waiter: asyncio.Future[HandoffEntry]) -> None:
        if self._entries.get(name) is waiter:
            del self._entries[name]
