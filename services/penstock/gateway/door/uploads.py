"""Bodies of HTTP requests while they arrive, bounded each and together."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from penstock.errors import DeadlineExceeded, InvalidRequest, Overloaded, TooLarge, UnsupportedEncoding
from penstock.gateway.accounts.admission import ClientGone
from penstock.gateway.accounts.pot import TenantPot

_GZIP = ("gzip", "x-gzip")
_ENCODINGS = ("", "identity", *_GZIP)
_STEP = 1 << 18
"""Bytes that are decoded at a time, about a millisecond."""
BODY_S = 30.0
"""Seconds for a body to arrive; a slower body is given up, because it occupies room."""


class Uploads:
    """Reads bodies; one per gateway."""

    def __init__(self, room: TenantPot) -> None:
        """`room` is for the bytes of all bodies together at one time."""
        self._room = room

    @asynccontextmanager
    async def body(self, tenant: str, headers: Headers, receive: Receive, most: int) -> AsyncIterator[bytes]:
        """One body of at most `most` bytes, which counts until the block ends.

        A body that is compressed by gzip is bounded as it is sent and as it is decoded. Raises TooLarge as soon as that
        is clear, if possible before the first byte is read, Overloaded when the bodies together would be too large,
        DeadlineExceeded after `BODY_S`, UnsupportedEncoding, InvalidRequest and ClientGone.
        """
        encoding = headers.get("content-encoding", "").strip().lower()
        if encoding not in _ENCODINGS:
            what = f"content-encoding: {encoding[:40]!r} is not supported; send gzip or no encoding"
            raise UnsupportedEncoding(what, field="content-encoding", code="unsupported_encoding")
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > most:
            raise _too_large(most)
        pieces = _Pieces(self._room, tenant)
        try:
            try:
                async with asyncio.timeout(BODY_S):
                    await self._read(receive, pieces, most)
                    if encoding in _GZIP:
                        await self._inflate(pieces, most)
            except TimeoutError:
                raise DeadlineExceeded("the body took too long to arrive", code="timeout") from None
            yield pieces.whole()
        finally:
            pieces.drop()

    async def _read(self, receive: Receive, pieces: _Pieces, most: int) -> None:
        size, more = 0, True
        while more:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            size += len(piece)
            if size > most:
                raise _too_large(most)
            pieces.take(piece)
            more = message.get("more_body", False)

    async def _inflate(self, pieces: _Pieces, most: int) -> None:
        """Puts the decoded body in place of the sent one."""
        sent, size = pieces.whole(), 0
        pieces.drop()
        try:
            for piece in _decoded(sent):
                size += len(piece)
                if size > most:
                    raise _too_large(most)
                pieces.take(piece)
                await asyncio.sleep(0)  # others have their turn between steps
        except zlib.error:
            what = "content-encoding: the body is not valid gzip"
            raise InvalidRequest(what, field="content-encoding") from None


class _Pieces:
    """Those of one body."""

    def __init__(self, room: TenantPot, tenant: str) -> None:
        self._room = room
        self._tenant = tenant
        self._pieces: list[bytes] = []

    def take(self, piece: bytes) -> None:
        """One more. Raises Overloaded when there is no room for it."""
        if not piece:
            return
        if not self._room.take(self._tenant, len(piece)):
            what = "the gateway is receiving too many long bodies; try again later"
            raise Overloaded(what, code="overloaded", retry_after=1)
        self._pieces.append(piece)

    def whole(self) -> bytes:
        """All of them."""
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def drop(self) -> None:
        """They count no more."""
        if size := sum(map(len, self._pieces)):
            self._room.give_back(self._tenant, size)
        self._pieces.clear()


def _decoded(sent: bytes) -> Iterator[bytes]:
    """What gzip has compressed, in pieces of which each takes about a millisecond. Raises zlib.error."""
    decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    for at in range(0, len(sent), _STEP):
        rest = sent[at : at + _STEP]
        while rest:
            yield decoder.decompress(rest, _STEP)
            rest = decoder.unconsumed_tail
    if not decoder.eof:
        raise zlib.error("the end is missing")


def _too_large(most: int) -> TooLarge:
    return TooLarge(f"the body is longer than {most} bytes", code="body_too_large")
