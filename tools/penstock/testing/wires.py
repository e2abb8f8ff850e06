"""Ways between the services of a mesh on one host, which can be cut and slowed down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from penstock.cli.child import ChildSpec
from penstock.runtime.addresses import UNIX, UnixPath, socket_address
from penstock.runtime.tasks import first_of

_PIECE, _SLOW_PIECE = 1 << 16, 1 << 12
_SERVER = "unix://"
"""How addresses of Redis begin; those of services have one slash."""
_SAYS_WHERE = ("prefill", "decode", "kvstore")
"""Services that others hear of from a router."""


class CuttableWire:
    """A proxy to one address, which may be a Unix socket. Made by `cuttable_wire`."""

    def __init__(self, target: str) -> None:
        self.address = ""
        self.delay_s = 0.0
        """With which each piece of at most 4 KiB passes."""
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """From now on nothing passes, and nobody is told: connections stand."""
        self._open.clear()

    def heal(self) -> None:
        """New connections work again, at once; those that were cut are gone."""
        self.delay_s = 0.0
        if not self._open.is_set():
            for writer in list(self._writers):
                writer.transport.abort()
            self._open.set()

    def end(self) -> None:
        """Breaks every connection."""
        self.cut()
        self.heal()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        target = socket_address(self._target)
        try:
            if isinstance(target, UnixPath):
                there, back = await asyncio.open_unix_connection(target.path)
            else:
                there, back = await asyncio.open_connection(target.host, target.port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, back}
        self._writers |= both
        task = asyncio.current_task()
        assert task is not None, "the server runs each connection in a task"
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            await first_of(self._pump(reader, back), self._pump(there, writer))
        finally:
            self._writers -= both
            for one in both:
                one.transport.abort()
                with suppress(OSError):
                    await one.wait_closed()

    async def ended(self) -> None:
        """Returns when no connection is left."""
        if self._connections:
            await asyncio.wait(self._connections)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(_SLOW_PIECE if self.delay_s else _PIECE):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._open.wait()
                if writer.transport.is_closing():  # uvloop's raises then
                    return
                writer.write(piece)
                await writer.drain()


@asynccontextmanager
async def cuttable_wire(target: str, at: str = "") -> AsyncIterator[CuttableWire]:
    """A proxy to `target`, for the length of the block: at the path of a Unix socket, or at a port that is free."""
    wire = CuttableWire(target)
    if at:
        server = await asyncio.start_unix_server(wire.serve, at)
        wire.address = UNIX + at
    else:
        server = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
        wire.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield wire
    finally:
        server.close()
        wire.end()
        await wire.ended()


class MeshWires:
    """All ways of each service but those that it takes to an address that it has heard from others, such as that of a
    worker: who is cut off is not reached, and reaches no router, store, draft service or Redis."""

    def __init__(self, directory: Path) -> None:
        """`directory` is for sockets; its path must be short."""
        self._directory = directory
        self._stack = AsyncExitStack()
        self._into: dict[str, list[CuttableWire]] = {}
        self._out_of: dict[str, list[CuttableWire]] = {}
        self._count = 0

    async def __aenter__(self) -> MeshWires:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def around(self, children: Sequence[ChildSpec]) -> list[ChildSpec]:
        """The same services, each with ways of its own."""
        own = {_argument(child, "--address"): child.name for child in children if "--address" in child.command}
        return [await self._around(child, own) for child in children]

    async def door(self, service: str, address: str) -> str:
        """Another way into a service, for clients; its address."""
        wire = await self._stack.enter_async_context(cuttable_wire(address))
        self._into.setdefault(service, []).append(wire)
        return wire.address

    def cut(self, service: str) -> None:
        """Nothing gets to it or away from it any more."""
        for wire in self._of(service):
            wire.cut()

    def slow(self, service: str, delay_s: float) -> None:
        """Every piece of 4 KiB to it and away from it takes so long."""
        for wire in self._of(service):
            wire.delay_s = delay_s

    def heal(self, service: str) -> None:
        """All is as it was."""
        for wire in self._of(service):
            wire.heal()

    def _of(self, service: str) -> Iterator[CuttableWire]:
        yield from self._into.get(service, ())
        yield from self._out_of.get(service, ())

    async def _around(self, child: ChildSpec, own: dict[str, str]) -> ChildSpec:
        words = list(child.command)
        for at, word in enumerate(words):
            if not word.startswith(UNIX):
                continue
            if words[at - 1] == "--address":
                words[at] = f"{word}-own"
                wire = await self._stack.enter_async_context(cuttable_wire(words[at], word.removeprefix(UNIX)))
                self._into.setdefault(child.name, []).append(wire)
                if child.name.partition("-")[0] in _SAYS_WHERE:
                    words += ["--advertise", word]
            elif words[at - 1] != "--advertise":
                words[at] = ",".join([await self._way(child.name, part, own) for part in word.split(",")])
        return replace(child, command=tuple(words))

    async def _way(self, service: str, target: str, own: dict[str, str]) -> str:
        """From a service to an address; the address to use instead."""
        begin = _SERVER if target.startswith(_SERVER) else UNIX
        path = target.removeprefix(begin)
        self._count += 1
        at = str(self._directory / f"w{self._count}")
        wire = await self._stack.enter_async_context(cuttable_wire(UNIX + path, at))
        self._out_of.setdefault(service, []).append(wire)
        if target not in own:  # Redis, which is none of the children
            self._into.setdefault("redis", []).append(wire)
        return begin + at


def _argument(child: ChildSpec, name: str) -> str:
    return child.command[child.command.index(name) + 1]
