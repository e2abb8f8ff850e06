"""Bodies of HTTP requests while they arrive, bounded each and together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from penstock.errors import DeadlineExceeded, Overloaded, TooLarge
from penstock.gateway.accounts.admission import ClientGone

BODY_S = 30.0
"""Seconds for a body to arrive; a slower body is given up, because it occupies room."""


class Uploads:
    """Reads bodies; one per gateway."""

    def __init__(self, most: int) -> None:
        """`most` is the number of bytes that all bodies together may have at one time."""
        self._most = most
        self.bytes = 0
        """Bytes of all bodies that are held now."""

    @asynccontextmanager
    async def body(self, headers: Headers, receive: Receive, most: int) -> AsyncIterator[bytes]:
        """One body of at most `most` bytes, which counts until the block ends.

        Raises TooLarge as soon as that is clear, if possible before the first byte is read, Overloaded when the
        bodies together would be too large, DeadlineExceeded after `BODY_S` and ClientGone.
        """
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > most:
            raise _too_large(most)
        pieces: list[bytes] = []
        try:
            try:
                async with asyncio.timeout(BODY_S):
                    await self._read(receive, pieces, most)
            except TimeoutError:
                raise DeadlineExceeded("the body took too long to arrive", code="timeout") from None
            yield b"".join(pieces)
        finally:
            self.bytes -= sum(map(len, pieces))

    async def _read(self, receive: Receive, pieces: list[bytes], most: int) -> None:
        size, more = 0, True
        while more:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            size += len(piece)
            if size > most:
                raise _too_large(most)
            if self.bytes + len(piece) > self._most:
                what = "the gateway is receiving too many long bodies; try again later"
                raise Overloaded(what, code="overloaded", retry_after=1)
            pieces.append(piece)
            self.bytes += len(piece)
            more = message.get("more_body", False)


def _too_large(most: int) -> TooLarge:
    return TooLarge(f"the body is longer than {most} bytes", code="body_too_large")
