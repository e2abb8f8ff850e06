"""The way between a worker and the host of a stage: a stream of gRPC, for threads that wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import suppress
from queue import SimpleQueue
from threading import Condition

from penstock.v1 import stage_pb2

_PART = 1 << 20
_MOST_WAITING = 64 << 20
"""Bytes that may wait on each side, in each direction, before who sends more waits; one message may be longer."""
_MOST_BYTES = 1 << 32
"""Of a message; no step has as much."""


class StageWay:
    """A Distance. Made on the event loop; what it is as such, threads call, and the rest the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._out: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._in: SimpleQueue[bytes | None] = SimpleQueue()
        self._changed = Condition()
        """For what is below, which threads and the loop use."""
        self.unsent = 0
        """Bytes that wait until the stream takes them."""
        self._closed = False
        self.unread = 0
        """Bytes that wait until a thread takes them."""
        self._taken = asyncio.Event()

    def send(self, content: bytes) -> None:
        """See Distance. Waits while much has not been sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.unsent < _MOST_WAITING)
        self.put(content)

    def put(self, content: bytes) -> None:
        """As `send`, without a wait. Callable from any thread."""
        with self._changed:
            self.unsent += len(content)
        self._tell(content)

    def receive(self) -> bytes:
        """See Distance."""
        if (content := self._in.get()) is None:
            self._in.put(None)
            raise EOFError("the other host has ended the stream")
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._took, len(content))
        return content

    def close(self) -> None:
        """See Distance."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._in.put(None)
        self._tell(None)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._taken.set)

    def _tell(self, content: bytes | None) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._out.put_nowait, content)

    def _took(self, size: int) -> None:
        self.unread -= size
        self._taken.set()

    async def parts(self, version: str = "") -> AsyncIterator[stage_pb2.StagePart]:
        """What goes to the other host, until the end; the first part says `version`."""
        while (content := await self._out.get()) is not None:
            for begin in range(0, max(1, len(content)), _PART):
                end = begin + _PART
                yield stage_pb2.StagePart(content=content[begin:end], more=end < len(content), version=version)
                version = ""
            with self._changed:
                self.unsent -= len(content)
                self._changed.notify_all()

    async def read(self, parts: AsyncIterable[stage_pb2.StagePart]) -> None:
        """Takes what comes from the other host, until it ends or sends what no stage does."""
        begun: list[bytes] = []
        size = 0
        try:
            async for part in parts:
                begun.append(part.content)
                size += len(part.content)
                if size > _MOST_BYTES:
                    return
                if part.more:
                    continue
                self.unread += size
                self._in.put(b"".join(begun))
                begun, size = [], 0
                while self.unread > _MOST_WAITING and not self._closed:
                    self._taken.clear()
                    await self._taken.wait()
        finally:
            self.close()
