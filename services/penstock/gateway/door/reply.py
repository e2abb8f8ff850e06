"""The response's side of one exchange over HTTP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from starlette.types import Send

from penstock.errors import PenstockError
from penstock.gateway.api.openai.shapes import Json, encode, error_json

JSON = "application/json"


class Reply:
    """Sends one response, whole or as events. An error before the first byte is a status, after it an event."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id.encode()
        self._begun = False
        self.ended = False
        """Whether the last byte was sent."""

    async def json(self, value: Json, status: int = 200, retry_after: float | None = None) -> None:
        """Sends a whole response."""
        body = encode(value)
        headers = [(b"content-length", str(len(body)).encode())]
        if retry_after is not None:
            headers.append((b"retry-after", str(math.ceil(retry_after)).encode()))
        await self._begin(status, JSON, headers)
        await self._send({"type": "http.response.body", "body": body})
        self.ended = True

    async def events(self, values: Sequence[Json]) -> None:
        """Sends each value as a server-sent event."""
        await self._write(b"".join(b"data: " + encode(value) + b"\n\n" for value in values))

    async def ping(self) -> None:
        """Sends a comment, which clients skip."""
        await self._write(b": ping\n\n")

    async def end_events(self) -> None:
        """Sends the last event and ends the response."""
        await self._write(b"data: [DONE]\n\n", more=False)
        self.ended = True

    async def error(self, error: PenstockError) -> None:
        """Reports an error to the client: as a response of its own, or as an event when the stream has begun."""
        if self.ended:
            return
        with suppress(OSError):
            if not self._begun:
                await self.json(error_json(error), error.http_status, error.retry_after)
                return
            await self._write(b"data: " + encode(error_json(error)) + b"\n\n", more=False)
        self.ended = True

    async def _write(self, data: bytes, more: bool = True) -> None:
        if not self._begun:
            await self._begin(200, "text/event-stream; charset=utf-8", [(b"cache-control", b"no-cache")])
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _begin(self, status: int, kind: str, headers: list[tuple[bytes, bytes]]) -> None:
        self._begun = True
        own = [(b"content-type", kind.encode()), (b"x-request-id", self._request_id)]
        await self._send({"type": "http.response.start", "status": status, "headers": own + headers})
