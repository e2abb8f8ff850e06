"""The client that loads every server: it sends prompts as token ids, and takes the time of every token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import cast

import httptools
import msgspec

from penstock.bench.e2e.answers import TimedAnswer
from penstock.bench.e2e.dialects import Dialect

_EVENT_END = b"\n\n"
_REFUSALS = (429, 503)
_PAUSE_S = 1.0
"""After a refusal that does not say how long."""
Begun = Callable[[], None]


def _nothing() -> None:
    pass


class AskFailed(Exception):
    """A request got no whole answer; the message says which and why."""


class TimedClient:
    """Streams completions from one server, each over a connection of its own."""

    def __init__(self, host: str, port: int, dialect: Dialect, limit_s: float = 600.0) -> None:
        """A request that takes longer than `limit_s` has failed."""
        self._host = host
        self._port = port
        self._dialect = dialect
        self._limit_s = limit_s

    async def ask(self, prompt: Sequence[int], tokens: int, session: str, begun: Begun = _nothing) -> TimedAnswer:
        """The answer of exactly `tokens` tokens, generated greedily; calls `begun` at its first. Raises AskFailed.

        Where the server refuses for now, the request is sent again when it says, and its time goes on.
        """
        request = self._request(msgspec.json.encode(self._dialect.body(prompt, tokens)), session)
        answer = TimedAnswer(time.perf_counter())
        try:
            async with asyncio.timeout(self._limit_s):
                while (stream := await self._send(request, answer, begun)).status in _REFUSALS:
                    answer.refusals += 1
                    await asyncio.sleep(stream.retry_after)
        except TimeoutError:
            raise AskFailed(f"no whole answer within {self._limit_s:.0f} s") from None
        except OSError as error:
            raise AskFailed(f"no connection to {self._host}:{self._port}, or not to its end: {error}") from None
        if stream.status != 200:
            raise AskFailed(f"status {stream.status}: {stream.rest.decode(errors='replace')[:400]}")
        if len(answer.ids) != tokens:
            raise AskFailed(f"{len(answer.ids)} tokens came instead of {tokens}: {stream.said[:400]!r}")
        return answer

    async def _send(self, request: bytes, answer: TimedAnswer, begun: Begun) -> _Stream:
        """Fills the answer. Raises OSError."""
        transport, stream = await asyncio.get_running_loop().create_connection(
            lambda: _Stream(request, self._dialect, answer, begun), self._host, self._port
        )
        try:
            await stream.ended
        finally:
            transport.abort()
        return stream

    def _request(self, content: bytes, session: str) -> bytes:
        lines = (
            f"POST {self._dialect.path} HTTP/1.1",
            f"host: {self._host}",
            "content-type: application/json",
            f"x-session-affinity: {session}",
            f"content-length: {len(content)}",
            "connection: close",
        )
        return "\r\n".join((*lines, "", "")).encode() + content


class _Stream(asyncio.Protocol):
    """One request and its stream of events. The `on_` methods are those that httptools calls."""

    def __init__(self, request: bytes, dialect: Dialect, answer: TimedAnswer, begun: Begun) -> None:
        self._request = request
        self._answer = answer
        self._begun = begun
        self._dialect = dialect
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self.status = 0
        self.retry_after = _PAUSE_S
        """Seconds."""
        self.rest = b""
        """What has come since the last whole event; all of it when the status is an error's."""
        self.said = b""
        """The last event."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(OSError(f"not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after" and value.isdigit():
            self.retry_after = float(value)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.rest += body
        if self.status != 200:
            return
        *events, self.rest = self.rest.split(_EVENT_END)
        for event in events:
            self._read(event)

    def on_message_complete(self) -> None:
        self._end(None)

    def _read(self, event: bytes) -> None:
        self.said = event
        text = event.removeprefix(b"data: ")
        if not text.startswith(b"{"):
            return
        before = len(self._answer.ids)
        self._dialect.read(msgspec.json.decode(text), self._answer, self._now)
        if not before and self._answer.ids:
            self._begun()

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
