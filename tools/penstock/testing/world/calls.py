"""Calls as a client of grpc.aio sees them, over the pretended network."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import Any, NamedTuple

import grpc

from penstock.runtime.tasks import start
from penstock.testing.world.network import Network, PretendConnection, Wire, ended
from penstock.testing.world.virtual import PretendProcess

Pairs = Sequence[tuple[str, Any]]
_CANCELLED = "Locally cancelled by application!"
_FIRST_BACKOFF_S, _MOST_BACKOFF_S = 0.05, 1.0
"""As the options of `penstock.rpc.channels` have them."""


def uncounted(task: str) -> None:
    """A defect in a background task is logged, and so ends the world."""


class CallEnd(NamedTuple):
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""
    trailers: Pairs = ()


class PretendChannel(grpc.aio.Channel):
    """From one process to one address, over one connection at a time."""

    def __init__(self, network: Network, process: PretendProcess, address: str, options: Sequence[Any]) -> None:
        self.network = network
        self.process = process
        self._address = address
        self._retried = _retried(options)
        self._connection: PretendConnection | None = None
        self._failures = 0
        self._rests_until = 0.0
        """It does not try to connect before."""
        self._calls: dict[PretendCall, None] = {}
        self._closed = False

    def join(self, call: PretendCall) -> None:
        """Has a call opened, or fail, over the connection that there is or will be."""
        connection, loop = self._connection, self.network.loop
        if connection is None or connection.closed:
            if loop.now < self._rests_until:
                loop.call_soon(call.unreachable, "connecting fails", context=self.process.context)
                return
            connection = self._connection = self.network.connect(self.process, self._address, self._reached)
        if connection.ready:
            call.opened(connection)
        else:
            connection.waiting[call] = None

    def _reached(self, well: bool) -> None:
        """A connection came about, or did not."""
        self._failures = 0 if well else self._failures + 1
        if not well:
            pause = min(_MOST_BACKOFF_S, _FIRST_BACKOFF_S * 1.6 ** (self._failures - 1))
            self._rests_until = self.network.loop.now + pause * (0.8 + 0.4 * self.network.random.random())

    def forget(self, call: PretendCall) -> None:
        """It has ended."""
        self._calls.pop(call, None)

    def _method(self, method: str, more: dict[str, Any], *, many: bool, stream: bool) -> Any:
        write, parse = more.get("request_serializer") or bytes, more.get("response_deserializer")
        retries = 2 if method.split("/")[1] in self._retried else 0

        def call(given: Any = None, *, timeout: float | None = None, metadata: Any = (), **_: Any) -> PretendCall:
            if self._closed:
                raise grpc.aio.UsageError("Channel is closed.")
            kind = PretendStreamCall if stream else PretendUnaryCall
            made = kind(self, method, write=write, parse=parse, timeout=timeout, metadata=tuple(metadata or ()))
            made.retries = retries
            self._calls[made] = None
            made.begin(given, many=many)
            return made

        return call

    def unary_unary(self, method: str, **more: Any) -> Any:  # type: ignore[override]
        return self._method(method, more, many=False, stream=False)

    def unary_stream(self, method: str, **more: Any) -> Any:  # type: ignore[override]
        return self._method(method, more, many=False, stream=True)

    def stream_unary(self, method: str, **more: Any) -> Any:  # type: ignore[override]
        return self._method(method, more, many=True, stream=False)

    def stream_stream(self, method: str, **more: Any) -> Any:  # type: ignore[override]
        return self._method(method, more, many=True, stream=True)

    async def close(self, grace: float | None = None) -> None:
        """Cancels all calls."""
        self._closed = True
        for call in [*self._calls]:
            call.cancel()
        if self._connection is not None:
            self._connection.close()

    async def __aenter__(self) -> PretendChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.IDLE

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        raise NotImplementedError

    async def channel_ready(self) -> None:
        raise NotImplementedError


def _retried(options: Sequence[Any]) -> frozenset[str]:
    """The services whose calls the channel's own settings have tried again."""
    text = dict(options or ()).get("grpc.service_config")
    methods = json.loads(text)["methodConfig"] if text else ()
    return frozenset(name["service"] for one in methods if "retryPolicy" in one for name in one["name"])


class PretendCall:
    """One call, of whichever kind; what all have of `grpc.aio.Call`."""

    def __init__(
        self,
        channel: PretendChannel,
        method: str,
        *,
        write: Callable[[Any], bytes],
        parse: Callable[[bytes], Any] | None,
        timeout: float | None,
        metadata: Pairs,
    ) -> None:
        self.method = method
        self.retries = 0
        """How often it may yet be tried again."""
        self._loop = channel.network.loop
        self._channel = channel
        self._write_one, self._parse = write, parse
        self._metadata = metadata
        self._timeout = timeout
        self._sent: list[bytes] = []
        self._closed = False
        """No more requests."""
        self._wire: Wire | None = None
        self._arrived: deque[bytes] = deque()
        self._answered = False
        self._last: CallEnd | None = None
        """How it ended, while messages before that wait to be read."""
        self._end: CallEnd | None = None
        self._locally = False
        self._open: asyncio.Future[None] = self._loop.create_future()
        self._reader: asyncio.Future[None] | None = None
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._poller: Any = None
        self._timer: asyncio.TimerHandle | None = None

    # -- beginning

    def begin(self, given: Any, *, many: bool) -> None:
        """Sends the request, or the requests of an iterator."""
        if self._timeout is not None:
            self._timer = self._loop.call_later(
                max(0.0, self._timeout), self._expire, context=self._channel.process.context
            )
        if not many:
            self._sent.append(self._write_one(given))
            self._closed = True
        elif given is not None:
            self._poller = start(lambda: self._send_all(given), name="sender", on_failure="log", failed=uncounted)
        self._channel.join(self)

    async def _send_all(self, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                await self.write(request)
            await self.done_writing()
        except grpc.aio.AioRpcError:
            return
        except BaseException:  # as grpc has it: whatever the iterator raises ends the call
            self.cancel()

    def opened(self, connection: PretendConnection) -> None:
        """The connection stands: says all that was said so far."""
        if self._end is not None:
            return
        server = connection.server
        assert server is not None
        wire = self._wire = Wire(connection, server, self)
        connection.wires[wire] = None
        wire.up("begins", 0, server.accept, wire, self.method, self._metadata, self._left())
        for message in self._sent:
            self._say(wire, message)
        if self._closed:
            self._say(wire, None)
        ended(self._open)

    def _left(self) -> float | None:
        return None if self._timer is None else self._timer.when() - self._loop.now

    @staticmethod
    def _say(wire: Wire, message: bytes | None) -> None:
        """Sends a request, or that there is none any more."""

        def arrive() -> None:
            if wire.served is not None:
                wire.served.hear(message)

        wire.up("says" if message is not None else "has said all", len(message or b""), arrive)

    # -- what comes

    def hear(self, wire: Wire, message: bytes) -> None:
        """An answer has arrived."""
        if self._end is None and self._last is None and wire is self._wire:
            self._answered = True
            self._arrived.append(message)
            ended(self._reader)

    def hear_end(self, wire: Wire, end: CallEnd) -> None:
        """The server has ended the call."""
        if self._end is not None or wire is not self._wire:
            return
        wire.over()
        if self._again(end):
            return
        if self._arrived:
            self._last = end
        else:
            self._finish(end)

    def unreachable(self, why: str) -> None:
        """No connection comes about."""
        self._fail(CallEnd(grpc.StatusCode.UNAVAILABLE, why))

    def broke(self, wire: Wire) -> None:
        """The connection broke."""
        if wire is self._wire:
            wire.over()
            if wire.connection.loses:
                self._arrived.clear()
            self._fail(CallEnd(grpc.StatusCode.UNAVAILABLE, "Socket closed"))

    def _fail(self, end: CallEnd) -> None:
        if self._end is None and self._last is None and not self._again(end):
            if self._arrived:
                self._last = end
            else:
                self._finish(end)

    def _again(self, end: CallEnd) -> bool:
        """Tries again what may not have been done, as the channel's settings have it."""
        if end.code is not grpc.StatusCode.UNAVAILABLE or self._answered or not self.retries:
            return False
        self.retries -= 1
        self._wire = None
        pause = (0.04 if self.retries == 0 else 0.02) * (0.8 + 0.4 * self._channel.network.random.random())
        self._loop.call_later(pause, self._rejoin, context=self._channel.process.context)
        return True

    def _rejoin(self) -> None:
        if self._end is None:
            self._channel.join(self)

    def _expire(self) -> None:
        if self._end is None:
            self._arrived.clear()
            self._finish(CallEnd(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
            self._leave()

    def _leave(self) -> None:
        """The server hears that nobody waits any more."""
        wire = self._wire
        if wire is not None and wire in wire.connection.wires:

            def arrive() -> None:
                wire.over()
                if wire.served is not None:
                    wire.served.gone()

            wire.up("leaves", 0, arrive)

    def _finish(self, end: CallEnd) -> None:
        self._end = end
        self._channel.forget(self)
        if self._timer is not None:
            self._timer.cancel()
        for future in (self._open, self._reader, self._over):
            ended(future)

    # -- as grpc.aio has it

    def done(self) -> bool:
        return self._end is not None

    def cancelled(self) -> bool:
        return self._end is not None and self._end.code is grpc.StatusCode.CANCELLED

    def cancel(self) -> bool:
        if self._end is not None:
            return False
        self._locally = True
        self._arrived.clear()
        self._finish(CallEnd(grpc.StatusCode.CANCELLED, _CANCELLED))
        self._leave()
        if self._poller is not None:
            self._poller.cancel()
        return True

    async def _ending(self) -> CallEnd:
        if self._end is None:
            await asyncio.shield(self._over)
        assert self._end is not None
        return self._end

    async def code(self) -> grpc.StatusCode:
        return (await self._ending()).code

    async def details(self) -> str:
        return (await self._ending()).details

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*(await self._ending()).trailers)

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    def error(self) -> BaseException:
        """What a reader of the failed call gets."""
        assert self._end is not None
        if self._locally:
            return asyncio.CancelledError()
        trailers = grpc.aio.Metadata(*self._end.trailers)
        return grpc.aio.AioRpcError(self._end.code, grpc.aio.Metadata(), trailers, details=self._end.details)

    def check(self) -> None:
        """Raises the error of a call that has failed."""
        if self._end is not None and self._end.code is not grpc.StatusCode.OK:
            raise self.error()

    async def write(self, request: Any) -> None:
        if self._end is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._closed:
            raise asyncio.InvalidStateError('RPC is half closed after calling "done_writing".')
        await self._until(self._open)
        if self._end is not None:
            self.check()
        message = self._write_one(request)
        self._sent.append(message)
        if self._wire is not None:
            self._say(self._wire, message)
        await self._turn()

    async def done_writing(self) -> None:
        if self._end is not None or self._closed:
            return
        await self._until(self._open)
        self._closed = True
        if self._wire is not None:
            self._say(self._wire, None)
        await self._turn()

    async def _turn(self) -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def _until(self, future: asyncio.Future[None]) -> None:
        """Waits; who is cancelled meanwhile cancels the call."""
        if future.done():
            return
        try:
            await (future if future is self._reader else asyncio.shield(future))
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def _next(self) -> bytes | None:
        """The next answer; None: there is none any more."""
        while not self._arrived:
            if self._end is not None:
                return None
            self._reader = self._loop.create_future()
            await self._until(self._reader)
        message = self._arrived.popleft()
        if not self._arrived and self._last is not None:
            self._finish(self._last)
        return message

    def _parsed(self, message: bytes) -> Any:
        return message if self._parse is None else self._parse(message)


class PretendStreamCall(PretendCall):
    """A call with many answers."""

    _iterator: AsyncIterator[Any] | None = None

    async def read(self) -> Any:
        if self._end is not None:
            self.check()
            return grpc.aio.EOF
        message = await self._next()
        if message is None:
            self.check()
            return grpc.aio.EOF
        return self._parsed(message)

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._iterator is None:
            self._iterator = self._all()
        return self._iterator

    async def _all(self) -> AsyncIterator[Any]:
        while (message := await self._next()) is not None:
            yield self._parsed(message)
        self.check()


class PretendUnaryCall(PretendCall):
    """A call with one answer."""

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        message = await self._next()
        while message is not None and self._end is None:  # the answer counts once the server has ended the call
            await self._until(self._over)
        self.check()
        assert message is not None
        return self._parsed(message)
