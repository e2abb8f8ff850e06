"""A client that costs little: it counts events, and reads no more of them than it is asked to."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

_END = b"\r\n0\r\n\r\n"
_EVENT = b"data: {"
_STAMP = re.compile(rb'"logprob":(-[\d.e-]+)[,}]')


class CountedAnswer(asyncio.Protocol):
    """One request on a connection of its own, and its answer."""

    def __init__(self, request: bytes, counted: Callable[[int], None], stamped: Callable[[float, float], None]) -> None:
        """`counted` hears of new events, `stamped` of each logprob and when it came."""
        self._request = request
        self._counted = counted
        self._stamped = stamped
        self._tail = b""
        self.status = 0
        self.asked = 0.0
        """`time.monotonic` when the request was sent, like the times below."""
        self.begun = 0.0
        """The first byte of the answer."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the request."""
        self.asked = time.monotonic()
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        """Counts."""
        now = time.monotonic()
        if not self.status:
            self.status, self.begun = int(data[9:12]), now
        text = self._tail + data
        if events := text.count(_EVENT):
            self._counted(events)
        for found in _STAMP.finditer(data):
            self._stamped(float(found[1]), now)
        if text.endswith(_END) or self.status != 200:
            self._end()
        self._tail = text[1 - len(_EVENT) :]  # an event's beginning may come in two pieces; it is as long as the end

    def connection_lost(self, exc: Exception | None) -> None:
        """The answer is over, whole or not."""
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Client:
    """Sends chat completions to one address."""

    def __init__(self, address: str, model: str = "emitted") -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._model = model

    def request(self, tokens: int, **more: Any) -> bytes:
        """The bytes of a streamed request for `tokens` tokens."""
        body = {"model": self._model, "messages": [{"role": "user", "content": "go"}], "stream": True}
        return self.encoded({**body, "max_tokens": tokens, **more})

    def encoded(self, body: Mapping[str, Any]) -> bytes:
        """The bytes of a request."""
        content = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content

    async def ask(
        self,
        request: bytes,
        counted: Callable[[int], None] = lambda _events: None,
        stamped: Callable[[float, float], None] = lambda _stamp, _now: None,
    ) -> CountedAnswer:
        """Sends the request and waits for the end of its answer."""
        transport, exchange = await asyncio.get_running_loop().create_connection(
            lambda: CountedAnswer(request, counted, stamped), self._host, self._port
        )
        try:
            await exchange.ended
        finally:
            transport.abort()
        return exchange
