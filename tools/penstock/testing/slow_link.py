"""A link that takes its time, for tests and benches on one host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field


@dataclass(slots=True)
class SlowLink:
    """A TCP relay to a port, by default of this host, which holds all bytes back."""

    port: int
    host: str = "127.0.0.1"
    _: KW_ONLY
    delay_s: float = 0.0
    """Of the way there and back together."""
    _open: set[asyncio.StreamWriter] = field(default_factory=set, init=False)
    _quiet: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Nothing is open any more."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """The address of this end, for the length of the block; then all connections break."""
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for writer in self._open:
                writer.transport.abort()
            if self._open:
                await self._quiet.wait()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        try:
            others = await asyncio.open_connection(self.host, self.port)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, others[1]}
        self._open |= ends
        self._quiet.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._one_way(reader, others[1]))
                tasks.create_task(self._one_way(others[0], writer))
        except* OSError:
            pass
        finally:
            for end in ends:
                end.close()
            self._open -= ends
            if not self._open:
                self._quiet.set()

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_deliver(line, writer))
            data = b"-"
            while data:
                data = await reader.read(1 << 16)
                line.put_nowait((loop.time() + self.delay_s / 2, data))


async def _deliver(line: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    """Writes each when it is due, and passes the end on."""
    data = b"-"
    while data:
        due, data = await line.get()
        await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
        writer.write(data)
    writer.write_eof()
