"""A service of a few lines, served by the real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from penstock.errors import Overloaded
from penstock.rpc.channels import Channels, open_channels
from penstock.rpc.context import outgoing
from penstock.rpc.server import RpcServer, serve
from penstock.runtime.context import current_request_id, trace_id

NAME = "toy.Toy"


class Toy:
    """Answers bytes with bytes, and remembers what became of its handlers."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cleaned = 0
        self.cleaning_takes: asyncio.Event | None = None

    async def ask(self, request: bytes, context: Any) -> bytes:
        """Unary."""
        if request == b"refuse":
            raise Overloaded("too much", field="n", retry_after=2.0)
        if request == b"break":
            raise RuntimeError("secret path /etc/x")
        if request == b"wait":
            await self._wait()
        return f"{current_request_id()} {trace_id()}".encode()

    async def count(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """Unary to stream."""
        for number in range(int(request)):
            yield str(number).encode()
        if request == b"3":
            raise Overloaded("too much", field="n", retry_after=2.0)
        await self._wait()

    async def echo(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Stream to stream."""
        try:
            async for request in requests:
                yield request
        finally:
            self.cleaned += 1

    async def total(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        """Stream to unary."""
        return str(sum([int(request) async for request in requests])).encode()

    async def _wait(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            if self.cleaning_takes is not None:
                await self.cleaning_takes.wait()
            self.cleaned += 1

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the four methods."""
        handlers = {
            "Ask": grpc.unary_unary_rpc_method_handler(self.ask),
            "Count": grpc.unary_stream_rpc_method_handler(self.count),
            "Echo": grpc.stream_stream_rpc_method_handler(self.echo),
            "Total": grpc.stream_unary_rpc_method_handler(self.total),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))


class Client:
    """Calls of the toy."""

    def __init__(self, server: RpcServer, channels: Channels) -> None:
        self.server = server
        self.channels = channels
        self.channel = channels.to(f"127.0.0.1:{server.port}", "worker")

    def ask(self, request: bytes, *metadata: tuple[str, str], **more: Any) -> Any:
        """Ask."""
        return self.channel.unary_unary(f"/{NAME}/Ask")(request, metadata=outgoing(*metadata), **more)

    def count(self, number: int) -> Any:
        """Count."""
        return self.channel.unary_stream(f"/{NAME}/Count")(str(number).encode())

    def echo(self) -> Any:
        """Echo."""
        return self.channel.stream_stream(f"/{NAME}/Echo")()

    def total(self, requests: Any) -> Any:
        """Total."""
        return self.channel.stream_unary(f"/{NAME}/Total")(requests)


@asynccontextmanager
async def served(toy: Toy, **settings: Any) -> AsyncIterator[Client]:
    """The toy on a real socket."""
    async with open_channels() as channels:
        async with serve("127.0.0.1:0", toy.register, [NAME], **settings) as server:
            await server.set_serving(True)
            yield Client(server, channels)
