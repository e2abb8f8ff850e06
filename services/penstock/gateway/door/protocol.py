"""uvicorn's HTTP/1.1, with bounds on everything outside of bodies; `uploads` bounds those."""

from __future__ import annotations

import asyncio
import logging
import socket
import weakref
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.gateway.request.bounds import MAX_HEADERS

READ_BYTES = 32 * 1024
"""Bytes that are read from a connection and parsed at once: each chunk of a body, be it six bytes, costs a call."""
MAX_OUTSIDE_BYTES = 64 * 1024
"""Consecutive bytes outside of bodies: a request line with its headers, the sizes of chunks, or trailers."""
HEAD_S = 10.0
"""Seconds from the first byte of a request to the end of its headers."""
MESSAGE_S = 60.0
"""Seconds from the end of the headers to the end of body and trailers; where files are sent, which may be long, to each
further piece."""
STALL_S = 60.0
"""Seconds in which a client has to take at least some of what waits for it, when that is more than fits in buffers."""
UNSENT_BYTES = 128 * 1024
"""Of an answer, that the kernel may keep for a client beyond what is on its way."""
_TCP_NOTSENT_LOWAT = 25
"""linux/tcp.h; Python's socket has no name for it."""
FILES = "/v1/files"
_BODY = "penstock.body"
"""The extension of the ASGI scope whose `writer` is the response's `StreamedBody`."""
_LOG_EVERY_S = 10.0
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class StreamedBody:
    """The body of one response that is sent in chunks, for the pieces between its first and its last: they go to the
    connection without the ASGI messages, and the layers that pass each of them on, which cost more than a piece."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # which has this object in its scope, and lives while the request is handled

    async def write(self, piece: bytes) -> None:
        """Writes a piece that is not empty. Waits while the client is slow; one that has left gets nothing."""
        cycle = self._cycle()
        if cycle is None:
            return
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


def streamed_body(scope: Scope) -> StreamedBody:
    """The body of the response to a request that `BoundedProtocol` has read."""
    body: StreamedBody = scope["extensions"][_BODY]["writer"]
    return body


class BoundedProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):
    """Closes connections that send too many bytes outside of bodies, or take too long; uvicorn bounds neither. Between
    two reads of `READ_BYTES` others have their turn: asyncio reads eight times as much at once by itself.

    uvicorn keeps trailers in memory like headers, even where the application does not read the body.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._outside = 0
        self._advanced = False
        self._headers_seen = 0
        self._long = False
        """Whether the body is a file."""
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._buffer = memoryview(b"")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the clock for the head of the first request. The kernel keeps little that was not sent: so it shows
        that a client reads, however slowly it does."""
        super().connection_made(transport)
        if (connection := transport.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._await(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clocks."""
        self._stop_timer()
        self._stop_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Starts the clock for a client that does not read: its request holds a place meanwhile."""
        super().pause_writing()
        self._stop_stall()
        self._stall = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops it: the client has read."""
        self._stop_stall()
        super().resume_writing()

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def get_buffer(self, sizehint: int) -> memoryview:
        """A buffer for one read; a view, as asyncio's TLS reads into slices of it."""
        self._buffer = memoryview(bytearray(READ_BYTES))
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parses what was read, and lets go of the buffer: most connections wait for their answers."""
        data, self._buffer = bytes(self._buffer[:nbytes]), memoryview(b"")
        self.data_received(data)

    def data_received(self, data: bytes) -> None:
        """Counts the bytes since the last end of a head or message, or since the last byte of a body."""
        self._advanced = False
        super().data_received(data)
        self._outside = 0 if self._advanced else self._outside + len(data)
        if self._outside > MAX_OUTSIDE_BYTES:
            self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        """Starts the clock for a head."""
        super().on_message_begin()
        self._headers_seen = 0
        self._await(HEAD_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts headers and trailers: each costs more memory than its bytes."""
        self._headers_seen += 1
        if self._headers_seen > MAX_HEADERS:
            self._refuse(_TOO_LARGE)
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Starts the clock for the rest of the message."""
        self._advanced = True
        self._await(MESSAGE_S)
        super().on_headers_complete()
        self._long = self.scope["path"] == FILES
        self.scope["extensions"] = {_BODY: {"writer": StreamedBody(self.cycle)}}

    def on_body(self, body: bytes) -> None:
        """Notes that the body grew."""
        self._advanced = True
        if self._long and not self.cycle.response_complete:
            self._await(MESSAGE_S)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stops the clock until the next request."""
        self._advanced = True
        self._stop_timer()
        super().on_message_complete()

    def _await(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._late, seconds)

    def _late(self, seconds: float) -> None:
        if self.flow.read_paused:  # the gateway has stopped reading, so the client cannot go on
            self._await(seconds)
        else:
            self._refuse(_TOO_SLOW)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, answer: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(answer)
        self.transport.close()


class Sparse(logging.Filter):
    """Lets a message through once in ten seconds: a client can make the server write one for every few bytes."""

    def __init__(self, clock: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._clock = clock
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write `record`: always for an error; for a warning when its text was not written lately."""
        if record.levelno > logging.WARNING:
            return True
        now = self._clock.time()
        if now - self._last.get(str(record.msg), -_LOG_EVERY_S) < _LOG_EVERY_S:
            return False
        self._last[str(record.msg)] = now
        return True
