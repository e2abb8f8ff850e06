"""The way between a worker and the host of a stage: a stream of gRPC, for threads that wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import suppress
from queue import SimpleQueue

from penstock.v1 import stage_pb2

_PART = 1 << 20
_MOST_BYTES = 1 << 32
"""Of a message: more than any step has."""


class StageWay:
    """A Distance. Made on the event loop; what it is as such, threads call, and the rest the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._out: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._in: SimpleQueue[bytes | None] = SimpleQueue()

    def send(self, content: bytes) -> None:
        """See Distance. How much may be on its way, the steps bound that are computed at a time."""
        self._put(content)

    def receive(self) -> bytes:
        """See Distance."""
        if (content := self._in.get()) is None:
            self._in.put(None)
            raise EOFError("the other host has ended the stream")
        return content

    def close(self) -> None:
        """See Distance."""
        self._in.put(None)
        self._put(None)

    def _put(self, content: bytes | None) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._out.put_nowait, content)

    async def parts(self, version: str = "") -> AsyncIterator[stage_pb2.StagePart]:
        """What goes to the other host, until the end; the first part says `version`."""
        while (content := await self._out.get()) is not None:
            for begin in range(0, max(1, len(content)), _PART):
                end = begin + _PART
                yield stage_pb2.StagePart(content=content[begin:end], more=end < len(content), version=version)
                version = ""

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
                if not part.more:
                    self._in.put(b"".join(begun))
                    begun, size = [], 0
        finally:
            self.close()
