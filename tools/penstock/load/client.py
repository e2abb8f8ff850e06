"""Requests over HTTP, each over a connection of its own, whose answers are read line by line as they come.

It does no more than that: what a client library adds per event, a load of many streams would take from the server
that it measures, or from itself.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Protocol, cast

import httptools

_LONGEST = 400
"""Characters of a body that an error shows."""
_MOST = 1 << 20
"""Bytes of a body that are kept."""

OnLine = Callable[[bytes, float], None]
"""Gets a line that is not empty, without its line feed, and when it came (`time.monotonic`)."""


class Address(Protocol):
    """What a client has to know of a server."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def tls(self) -> bool: ...
    @property
    def prefix(self) -> str: ...
    @property
    def key(self) -> str: ...


class HttpClient:
    """Talks to one server."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._host = f"[{address.host}]" if ":" in address.host else address.host
        self._tls = ssl.create_default_context() if address.tls else None

    def request(self, method: str, path: str, content: bytes = b"", header: tuple[str, str] | None = None) -> bytes:
        """The bytes of a request; `path` stands behind the prefix of the address."""
        lines = [
            f"{method} {self._address.prefix}{path} HTTP/1.1",
            f"host: {self._host}:{self._address.port}",
            "accept: text/event-stream, application/json",
            "content-type: application/json",
            f"content-length: {len(content)}",
            "connection: close",
        ]
        if self._address.key:
            lines.append(f"authorization: Bearer {self._address.key}")
        if header is not None:
            lines.append(": ".join(header))
        return "\r\n".join((*lines, "", "")).encode() + content

    async def send(self, request: bytes, on_line: OnLine | None = None) -> HttpAnswer:
        """The answer, when it has ended; lines of one with status 200 are told as they come, where that is wanted.
        Raises OSError."""
        loop = asyncio.get_running_loop()
        transport, answer = await loop.create_connection(
            lambda: HttpAnswer(request, on_line), self._address.host, self._address.port, ssl=self._tls
        )
        try:
            await answer.ended
        finally:
            transport.abort()
        return answer


class HttpAnswer(asyncio.Protocol):
    """One request and its answer. The `on_` methods are those that httptools calls."""

    def __init__(self, request: bytes, on_line: OnLine | None) -> None:
        self._request = request
        self._on_line = on_line
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self.status = 0
        self.retry_after = 1.0
        """Seconds."""
        self.body = b""
        """As far as it was not told line by line."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def text(self) -> str:
        """The body, or its beginning, for people."""
        return self.body.decode(errors="replace").strip()[:_LONGEST]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the request."""
        cast(asyncio.WriteTransport, transport).write(self._request)
        self._request = b""

    def data_received(self, data: bytes) -> None:
        """Reads on."""
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(OSError(f"not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The answer is over, whole or not."""
        self._end(exc or OSError("the connection ended before the answer did"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after" and value.isdigit():
            self.retry_after = float(value)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.body += body
        if self._on_line is None or self.status != 200:
            self.body = self.body[:_MOST]
            return
        *lines, self.body = self.body.split(b"\n")
        for line in lines:
            if len(line) > 1:  # events end with an empty one
                self._on_line(line, self._now)

    def on_message_complete(self) -> None:
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
