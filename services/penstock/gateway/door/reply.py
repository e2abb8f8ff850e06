"""The response's side of one exchange over HTTP."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from starlette.types import Send

from penstock.errors import PenstockError
from penstock.gateway.api.inquiry import Json, Style, encode
from penstock.gateway.completing.explaining import ANSWER
from penstock.gateway.door.protocol import StreamedBody

JSON = "application/json"
_MOST_IGNORED = 32
_NO_NAME = re.compile(r"[^\w.\[\]-]", re.ASCII)


class Reply:
    """Sends one response, whole or as events. An error before the first byte is a status, after it an event."""

    def __init__(self, send: Send, body: StreamedBody, request_id: str, style: Style) -> None:
        self._send = send
        self._body = body
        self._request_id = request_id
        self._style = style
        self._headers: list[tuple[bytes, bytes]] = []
        self._begun = False
        self.explains = False
        """Whether the client has asked why."""
        self.before_end: Callable[[], None] = lambda: None
        """Called before the last byte is sent."""
        self.ended = False
        """Whether the last byte was sent."""
        self.identifies = False
        """Events have ids. From then on some clients take a comment of its own for an event without data, so comments
        stand in the event that follows."""

    def ignored(self, fields: Sequence[str]) -> None:
        """Names fields of the request that had no effect in a header of the response."""
        if fields:
            names = ", ".join(_NO_NAME.sub("?", field) for field in fields[:_MOST_IGNORED])
            self._headers.append((b"x-penstock-ignored-fields", names.encode()))

    def seeded(self, seed: int) -> None:
        """Says in a header of the response with which seed it can be had again."""
        self._headers.append((b"x-penstock-seed", str(seed).encode()))

    def timed(self, parts: str) -> None:
        """Says in a header of the response where its time went."""
        self._headers.append((b"server-timing", parts.encode()))

    def explained(self, plans: str) -> bytes:
        """Says in a header of the response why it went where it went; of one that has begun, in the comment that is
        returned."""
        if self._begun:
            return self._comment(ANSWER.encode() + b" " + plans.encode())
        self._headers.append((ANSWER.encode(), plans.encode()))
        return b""

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Adds headers of the response, which has not begun."""
        self._headers += [(name.encode(), value.encode()) for name, value in headers.items()]

    async def json(self, value: Json, status: int = 200, retry_after: float | None = None) -> None:
        """Sends a whole response."""
        body = encode(value)
        headers = [(b"content-length", str(len(body)).encode())]
        if retry_after is not None:
            headers.append((b"retry-after", str(math.ceil(retry_after)).encode()))
        await self._begin(status, JSON, headers)
        self.before_end()
        await self._send({"type": "http.response.body", "body": body})
        self.ended = True

    async def write(self, events: bytes) -> None:
        """Sends server-sent events."""
        if self._begun:
            await self._body.write(events)
        else:
            await self._write(events)

    async def ping(self) -> None:
        """Sends what clients skip."""
        ping = self._style.ping
        await self.write(ping[:-1] if self.identifies and ping.startswith(b":") else ping)

    async def end_events(self, events: bytes, timing: str) -> None:
        """Sends the last events and ends the response. Where its time went is a comment, which clients skip."""
        last = events + self._style.last
        comment = self._comment(b"server-timing " + timing.encode()) if last else b""
        await self._write(comment + last, more=False)
        self.ended = True

    async def error(self, error: PenstockError, failed: Sequence[Json] = ()) -> None:
        """Reports an error to the client: as a response of its own, or as `failed` when the stream has begun."""
        if self.ended:
            return
        with suppress(OSError):
            if not self._begun:
                body = self._style.error(error, self._request_id)
                await self.json(body, error.http_status, error.retry_after)
                return
            events = failed or [self._style.last_word(error, self._request_id)]
            await self._write(self._style.written(events) + self._style.last, more=False)
        self.ended = True

    def _comment(self, text: bytes) -> bytes:
        return b": " + text + (b"\n" if self.identifies else b"\n\n")

    async def _write(self, data: bytes, more: bool = True) -> None:
        if not self._begun:
            await self._begin(200, "text/event-stream; charset=utf-8", [(b"cache-control", b"no-cache")])
        if not more:
            self.before_end()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _begin(self, status: int, kind: str, headers: list[tuple[bytes, bytes]]) -> None:
        self._begun = True
        names = {"x-request-id", self._style.id_header}
        own = [(b"content-type", kind.encode()), *((name.encode(), self._request_id.encode()) for name in names)]
        headers = own + headers + self._headers
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
