"""A bad network between two processes: a TCP relay that delays, stalls, cuts and creeps when it is told to."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Relay:
    """Listens on `address` and passes on to `target`. Reorders nothing: it is TCP."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = ""
        self.connections = 0
        self.down = 0
        """Bytes passed on from the target to its callers."""
        self.delay_s = 0.0
        """Added to every piece, in both directions."""
        self.cut_at: int | None = None
        """Once `down` reaches this, `cut` happens, once."""
        self.cut = self.reset
        self.creep = False
        """One byte at a time from the target, some milliseconds apart."""
        self._open = asyncio.Event()
        self._open.set()
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- faults

    def reset(self) -> None:
        """Ends every connection with a RST."""
        for pair in list(self._pairs):
            for writer in pair:
                sock = writer.get_extra_info("socket")
                with suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()

    def stall(self) -> None:
        """Nothing passes, nothing is closed, also for new connections; until `heal`."""
        self._open.clear()

    def heal(self) -> None:
        """Back to normal."""
        self._open.set()
        self.creep = False
        self.delay_s = 0.0

    # -- passing on

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, back)
        self._pairs.add(pair)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(reader, back, False))
                both.create_task(self._pass(there, writer, True))
        except* OSError:
            pass
        finally:
            self._pairs.discard(pair)
            for one in pair:
                one.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, down: bool) -> None:
        while data := await reader.read(1 if down and self.creep else 65536):
            await self._open.wait()
            if self.delay_s or (down and self.creep):
                await asyncio.sleep(self.delay_s or 0.005)
            if down and self.cut_at is not None and self.down + len(data) >= self.cut_at:
                self.cut_at = None
                self.cut()
                await self._open.wait()
            self.down += len(data) if down else 0
            writer.write(data)
            await writer.drain()
        raise ConnectionError("ended")

    async def close(self) -> None:
        self.heal()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


@asynccontextmanager
async def relay_to(target: str) -> AsyncIterator[Relay]:
    relay = Relay(target)
    server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
    relay.address = "{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield relay
    finally:
        server.close()
        await relay.close()
        await server.wait_closed()
