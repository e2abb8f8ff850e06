"""Servers as servicers of grpc.aio see them, over the pretended network."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import grpc

from penstock.runtime.tasks import being_cancelled, end, start
from penstock.testing.world.calls import CallEnd, Pairs, uncounted
from penstock.testing.world.network import Network, Wire, ended
from penstock.testing.world.virtual import PretendProcess


class _Details(NamedTuple):
    """What an interceptor hears of a call."""

    method: str
    invocation_metadata: Pairs


class PretendServer:
    """Of one process, at one address from `start` to `stop`."""

    def __init__(self, network: Network, process: PretendProcess, interceptors: Sequence[Any]) -> None:
        self.network = network
        self.process = process
        self.calls: dict[ServedCall, asyncio.Task[None]] = {}
        """That are served now."""
        self._interceptors = interceptors
        self._handlers: dict[str, Any] = {}
        self._address = ""
        self._stopping = False

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Those that are registered are the same."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Takes the methods of a servicer."""
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def add_insecure_port(self, address: str) -> int:
        """Listens there from `start` on; returns the port."""
        self._address = address
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        """Takes calls."""
        self.network.servers[self._address] = self

    async def stop(self, grace: float | None) -> None:
        """Takes none any more, and ends those that there are after `grace` seconds."""
        self._stopping = True
        if self.network.servers.get(self._address) is self:
            del self.network.servers[self._address]
        for connection in [*self.network.connections]:
            if connection.server is self:
                connection.close()
        if self.calls:
            await asyncio.wait([*self.calls.values()], timeout=grace)
        for call in [*self.calls]:
            call.abandon()
        await end(*self.calls.values())

    def accept(self, wire: Wire, method: str, metadata: Pairs, left_s: float | None) -> None:
        """A call has come, with so many seconds until its deadline."""
        call = wire.served = ServedCall(self, wire, metadata, left_s)
        if self._stopping or wire.connection.broken:
            call.finish(CallEnd(grpc.StatusCode.UNAVAILABLE, "the server is stopping"))
            return
        task = self.calls[call] = call.task = start(
            lambda: self._serve(call, method, metadata), name=method, on_failure="log", failed=uncounted
        )
        task.add_done_callback(lambda _: self._served(call))

    def _served(self, call: ServedCall) -> None:
        """Its task has ended, perhaps before it began."""
        call.finish(CallEnd(grpc.StatusCode.CANCELLED, "cancelled"))
        call.close()
        del self.calls[call]

    async def _serve(self, call: ServedCall, method: str, metadata: Pairs) -> None:
        try:
            await self._handle(call, method, metadata)
            call.finish(CallEnd(grpc.StatusCode.OK, "", call.trailing_metadata()))
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            call.finish(
                CallEnd(grpc.StatusCode.UNAVAILABLE if self._stopping else grpc.StatusCode.CANCELLED, "cancelled")
            )
            if being_cancelled():
                raise
        except Exception:
            if not call.over:
                raise  # else a reply was written to a client that has gone

    async def _handle(self, call: ServedCall, method: str, metadata: Pairs) -> None:
        found = self._handlers.get(method)
        if found is None:
            await call.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

        async def known(details: Any) -> Any:
            return found

        handler: Any = found
        for interceptor in self._interceptors:
            handler = await interceptor.intercept_service(known, _Details(method, metadata))
        parse = handler.request_deserializer or bytes
        request: Any = call.requests(parse) if handler.request_streaming else parse(await call.one())
        call.write_one = handler.response_serializer or bytes
        if handler.response_streaming:
            await (handler.stream_stream or handler.unary_stream)(request, call)
        else:
            await call.write(await (handler.stream_unary or handler.unary_unary)(request, call))


class ServedCall:
    """One call at its server: the `grpc.aio.ServicerContext`."""

    def __init__(self, server: PretendServer, wire: Wire, metadata: Pairs, left_s: float | None) -> None:
        self.over = False
        """Its client has gone, or has been told the end."""
        self.task: asyncio.Task[None] | None = None
        self.write_one: Any = bytes
        self._server = server
        self._wire = wire
        self._metadata = metadata
        self._loop = server.network.loop
        self._heard: deque[bytes | None] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._trailers: Pairs = ()
        self._until = None if left_s is None else self._loop.now + left_s
        self._timer = None if left_s is None else self._loop.call_later(max(0.0, left_s), self.gone)

    # -- what comes

    def hear(self, message: bytes | None) -> None:
        """A request has arrived, or that there is none any more."""
        self._heard.append(message)
        ended(self._reader)

    def gone(self) -> None:
        """Nobody waits for answers any more: the handler is cancelled, and so is whoever reads requests for it."""
        if self.over:
            return
        self.over = True
        self._wire.over()
        if self.task is not None:
            self.task.cancel()
        if self._reader is not None:
            self._reader.cancel()

    def abandon(self) -> None:
        """The server stops."""
        if self.task is not None:
            self.task.cancel()

    def close(self) -> None:
        """The handler has ended."""
        if self._timer is not None:
            self._timer.cancel()

    async def one(self) -> bytes:
        """The only request."""
        message = await self._next()
        if message is None:
            raise asyncio.CancelledError
        return message

    async def _next(self) -> bytes | None:
        while not self._heard:
            if self.over:
                return None
            self._reader = self._loop.create_future()
            await self._reader
        message = self._heard.popleft()
        if message is None:
            self._heard.append(None)
        return message

    async def requests(self, parse: Any) -> AsyncIterator[Any]:
        """All of them."""
        while (message := await self._next()) is not None:
            yield parse(message)

    # -- what goes

    def finish(self, end: CallEnd) -> None:
        """Tells the client the end."""
        if not self.over:
            self.over = True
            self._wire.down(end.code.name, 0, self._wire.call.hear_end, self._wire, end)

    async def write(self, reply: Any) -> None:
        """Sends an answer."""
        if self.over:
            raise RuntimeError("RPC already finished.")
        message = self.write_one(reply)
        self._wire.down("answers", len(message), self._wire.call.hear, self._wire, message)
        await asyncio.sleep(0)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """Ends the call with an error."""
        self.finish(CallEnd(code, details, tuple(trailing_metadata) or self._trailers))
        raise grpc.aio.AbortError("Locally aborted.")

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._trailers = tuple(metadata)

    def trailing_metadata(self) -> Pairs:
        return self._trailers

    def invocation_metadata(self) -> Pairs:
        return self._metadata

    def auth_context(self) -> dict[str, Any]:
        return {}

    def time_remaining(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - self._loop.now)
