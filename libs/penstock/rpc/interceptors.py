"""The server's one interceptor: request scope, parsing, span, error mapping, and a count of handlers in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf.message import Message
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from penstock.errors import DeadlineExceeded, Internal, InvalidRequest, Overloaded, PenstockError
from penstock.rpc.context import REQUEST_ID, read_trace, safe_request_id
from penstock.rpc.errors import status_code, to_trailers
from penstock.rpc.parsing import Parser, Requests
from penstock.runtime.context import request_scope
from penstock.runtime.telemetry import recording

NOT_READ = "not_read"
"""Code of a call that has ended because a reply of it was not taken: whoever calls again may be quicker."""
_QUIET = ("/grpc.health.", "/grpc.reflection.")
_MOST_QUIET = 32
"""Calls of these at a time, of a server that strangers reach."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Metadata = tuple[tuple[str, Any], ...]
CallEntrance = Callable[[str, Metadata, Any], AbstractAsyncContextManager[None]]
"""Of a method, the metadata of a call and its context: what surrounds the call. It may refuse by raising a
PenstockError."""


def no_entrance(_method: str, _metadata: Metadata, _context: Any) -> AbstractAsyncContextManager[None]:
    """Lets every call in."""
    return nullcontext()


class ReaderGone(Exception):
    """What a call's `CallEntrance` gets when a reply can't be written; its cause says why."""


class InFlight:
    """Counts running handlers. `grpc.aio.Server.stop` may return before handlers have cleaned up; `idle` does not."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Counts one handler for the length of the block."""
        self.count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.count -= 1
            if self.count == 0:
                self._idle.set()

    async def idle(self) -> None:
        """Returns when no handler runs."""
        await self._idle.wait()


class ServerInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler; those of health and reflection only get short requests.

    With `first_s` a call has so many seconds until its first message is there. gRPC itself waits for the message of a
    unary call before anybody hears of the call, for ever, while it holds one of the server's places; so unary methods
    are served as streams of one message, and their entrance sees them before it.

    With `stall_s` a reply of a stream has to be taken within so many seconds, or the call ends: one whose client does
    not read holds what it has for as long as it likes. gRPC takes replies on its own account up to a client's window
    and 64 KiB more, and only then lets a write wait. The status waits behind them until the client reads on or its
    connection ends, as grpc has nothing with which to reset a call; so what bounds the work are `most` calls that have
    not ended, and not those that grpc still has.
    """

    def __init__(
        self,
        in_flight: InFlight,
        entrance: CallEntrance = no_entrance,
        *,
        first_s: float | None = None,
        stall_s: float | None = None,
        most: int | None = None,
    ) -> None:
        self._in_flight = in_flight
        self._entrance = entrance
        self._first_s = first_s
        self._stall_s = stall_s
        self._most = most
        self._working = InFlight()
        self._quiet = asyncio.Semaphore(_MOST_QUIET)
        self._log = structlog.get_logger("penstock.rpc")
        self._tracer = trace.get_tracer("penstock")
        self._recording = recording()
        self._parsers: dict[str, Parser] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Replaces the method's behaviour by the wrapped one."""
        handler: Any = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None:
            return None
        parser = self._parser(method, handler)
        if method.startswith(_QUIET):
            quiet = _behaviour(handler) if self._first_s is None else self._bounded(handler, self._first_s)
            return _same(handler, quiet, parser.only_short if parser else None, self._first_s)
        metadata: Metadata = tuple(handler_call_details.invocation_metadata or ())
        wrap = self._stream if handler.response_streaming else self._unary
        wrapped = wrap(method, metadata, parser, _behaviour(handler))
        return _same(handler, wrapped, parser.short if parser else None, self._first_s)

    def _parser(self, method: str, handler: Any) -> Parser | None:
        """None for a method that takes bytes."""
        if handler.request_deserializer is None:
            return None
        if method not in self._parsers:
            self._parsers[method] = Parser(handler.request_deserializer)
        return self._parsers[method]

    def _bounded(self, handler: Any, first_s: float) -> Any:
        """What health and reflection do, for a few callers at a time: nobody has looked at who they are."""
        behaviour = _behaviour(handler)

        async def call(given: Any, context: Any) -> Any:
            if self._quiet.locked():
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {_MOST_QUIET} calls of this kind")
            async with self._quiet:
                try:
                    request = await given.message() if isinstance(given, _First) else given
                except PenstockError as error:
                    await context.abort(status_code(error), error.message)
                if not handler.request_streaming:
                    return await behaviour(request, context)
                with suppress(TimeoutError):  # then the stream ends; a client may open another
                    async with asyncio.timeout(first_s), aclosing(behaviour(request, context)) as replies:
                        async for reply in replies:
                            await context.write(reply)

        return call

    def _unary(self, method: str, metadata: Metadata, parser: Parser | None, behaviour: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            with self._in_flight.one(), self._scope(method, metadata):
                try:
                    with self._work():
                        async with self._entrance(method, metadata, context), _received(parser, request) as received:
                            return await behaviour(received, context)
                except Exception as error:
                    await self._abort(method, error, context)

        return call

    def _stream(self, method: str, metadata: Metadata, parser: Parser | None, behaviour: Any) -> Any:
        async def call(request: Any, context: Any) -> None:
            """Writes, not yields: a generator that is dropped would leave its span in another task's context."""
            with self._in_flight.one(), self._scope(method, metadata):
                try:
                    with self._work():
                        async with (
                            self._entrance(method, metadata, context),
                            _received(parser, request) as received,
                            aclosing(behaviour(received, context)) as replies,
                        ):
                            async for reply in replies:
                                await self._write(reply, context)
                except ReaderGone as gone:
                    raise gone.__cause__ or gone from None  # left to grpc
                except Exception as error:
                    await self._abort(method, error, context)

        return call

    @contextmanager
    def _work(self) -> Iterator[None]:
        """For the length of a call's work, which ends before its status is sent. Raises Overloaded."""
        if self._most is not None and self._working.count >= self._most:
            raise Overloaded("more calls than this server takes; try again later", code="overloaded", retry_after=1)
        with self._working.one():
            yield

    async def _write(self, reply: Any, context: Any) -> None:
        """Raises ReaderGone, and DeadlineExceeded for a client that does not read."""
        try:
            if self._stall_s is None:
                await context.write(reply)
            else:
                async with asyncio.timeout(self._stall_s):
                    await context.write(reply)
        except TimeoutError:
            what = f"the client has not taken a message of its answer for {self._stall_s:g} s; read them as they come"
            raise DeadlineExceeded(what, code=NOT_READ) from None
        except Exception as error:
            raise ReaderGone from error

    @contextmanager
    def _scope(self, method: str, metadata: Metadata) -> Iterator[None]:
        request_id = safe_request_id(next((value for key, value in metadata if key == REQUEST_ID), None))
        parent = read_trace(metadata)
        if not (request_id or self._recording or trace.get_current_span(parent).get_span_context().is_valid):
            yield  # the caller gave no ids, and no exporter wants spans
            return
        with request_scope(request_id or ""):
            with self._tracer.start_as_current_span(
                method.removeprefix("/penstock.v1."), parent, SpanKind.SERVER, record_exception=False
            ):
                yield

    async def _abort(self, method: str, error: Exception, context: Any) -> None:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if not isinstance(error, PenstockError):
            self._log.exception("handler failed", method=method)
            error = Internal("internal error")
        trace.get_current_span().set_status(StatusCode.ERROR, error.message)
        await context.abort(status_code(error), error.message, (*context.trailing_metadata(), *to_trailers(error)))


def _behaviour(handler: Any) -> Any:
    """The one of a handler's four shapes that it has."""
    if handler.response_streaming:
        return handler.stream_stream if handler.request_streaming else handler.unary_stream
    return handler.stream_unary if handler.request_streaming else handler.unary_unary


class _First:
    """The message of a call that is served as a stream and has one."""

    def __init__(self, requests: AsyncIterator[Any], seconds: float) -> None:
        self._requests = requests
        self._seconds = seconds

    async def message(self) -> Any:
        """Waits for it. Raises DeadlineExceeded, and InvalidRequest for a call without one."""
        try:
            async with asyncio.timeout(self._seconds):
                async for request in self._requests:
                    return request
        except TimeoutError:
            raise DeadlineExceeded(f"send the request within {self._seconds:g} s of the call") from None
        raise InvalidRequest("the call has no request")


def _same(handler: Any, behaviour: Any, parse: Callable[[bytes], Any] | None, first_s: float | None) -> Handler:
    """A handler that does `behaviour`, of the same shape to its callers."""
    if first_s is not None and not handler.request_streaming:

        async def first(requests: Any, context: Any) -> Any:
            return await behaviour(_First(requests, first_s), context)

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        patient: Handler = make(first, parse, handler.response_serializer)
        return patient
    if handler.response_streaming:
        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
    else:
        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
    made: Handler = make(behaviour, parse, handler.response_serializer)
    return made


@asynccontextmanager
async def _received(parser: Parser | None, given: Any) -> AsyncIterator[Any]:
    """The request, or the stream of requests, of what grpc hands over. Raises InvalidRequest."""
    if parser is None:
        yield await given.message() if isinstance(given, _First) else given
    elif isinstance(given, _First):
        yield await parser.whole(await given.message())
    elif isinstance(given, bytes | Message):
        yield await parser.whole(given)
    else:
        requests = Requests(parser, given)
        try:
            yield requests
        finally:
            await requests.aclose()
