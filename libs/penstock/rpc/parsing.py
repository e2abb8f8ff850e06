"""Requests from bytes to messages, without holding the event loop.

A parser keeps Python's global lock. Four megabytes of strings cost it a millisecond or two, but as empty messages they
are two million objects, and hundreds of megabytes. So the fields of a long request are counted first, in slices between
which the loop serves others, and a request with too many of them is refused before it is parsed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator
from functools import cached_property
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from penstock.errors import InvalidRequest

MAX_FIELDS = 1 << 17
"""Fields that a long request may have at all depths, give or take a slice: room for two full lists of block keys."""
SHORT = 32 * 1024
"""Bytes up to which a request is parsed at once: it cannot have more than half as many fields."""
_SLICE = 4096
"""Fields that are counted in one go."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Parser:
    """Parses the requests of one method."""

    def __init__(self, parse: Callable[[bytes], Message]) -> None:
        """`parse` is the `FromString` of a message class."""
        self._parse = parse
        descriptor: Descriptor = parse.__self__.DESCRIPTOR  # type: ignore[attr-defined]
        self._shape = _Shape(descriptor)

    def short(self, raw: bytes) -> Message | bytes:
        """The message when it is short, else the bytes as they are, for `whole`. Raises DecodeError."""
        return self._parse(raw) if len(raw) <= SHORT else raw

    def only_short(self, raw: bytes) -> Message:
        """The message. Raises DecodeError, also for one that is not short."""
        if len(raw) > SHORT:
            raise DecodeError(f"the request is longer than {SHORT} bytes")
        return self._parse(raw)

    async def whole(self, request: Message | bytes) -> Message:
        """The message of what `short` gave. Raises InvalidRequest."""
        if not isinstance(request, bytes):
            return request
        try:
            for _ in _slices(request, self._shape):
                await asyncio.sleep(0)
            return self._parse(request)
        except (DecodeError, IndexError):
            raise InvalidRequest("the request is not a valid message") from None


class Requests:
    """The messages of a stream of what `Parser.short` gave."""

    def __init__(self, parser: Parser, requests: AsyncIterable[Message | bytes]) -> None:
        self._parser = parser
        self._requests: AsyncIterator[Message | bytes] = aiter(requests)

    def __aiter__(self) -> Requests:
        return self

    async def __anext__(self) -> Message:
        """Raises InvalidRequest."""
        return await self._parser.whole(await anext(self._requests))

    async def aclose(self) -> None:
        """Ends grpc's own generator, which else waits for the garbage collector, perhaps beyond its event loop."""
        if isinstance(self._requests, AsyncGenerator):
            await self._requests.aclose()


class _Shape:
    """Which fields of a message are messages."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor

    @cached_property
    def inner(self) -> dict[int, _Shape]:
        """By field number; made when first needed, since messages may contain themselves."""
        fields: Any = self._descriptor.fields
        return {field.number: _Shape(field.message_type) for field in fields if field.message_type is not None}


def _slices(raw: bytes, shape: _Shape) -> Iterator[None]:
    """Counts all fields of a message, and pauses now and then.

    Raises InvalidRequest for too many, DecodeError or IndexError for what is no message. Groups, which only
    proto2 knew, are none.
    """
    count, at, end = 0, 0, len(raw)
    inner, outer = shape.inner, [(end, shape.inner)]
    while outer:
        end, inner = outer.pop()
        while at < end:
            count += 1
            if count % _SLICE == 0:
                if count > MAX_FIELDS:
                    raise InvalidRequest(f"the request has more than {MAX_FIELDS} fields", code="request_too_complex")
                yield
            tag = raw[at]
            at += 1
            if tag & 0x80:
                tag, at = _varint(raw, at - 1)
            kind = tag & 7
            if kind == _BYTES:
                length = raw[at]
                at += 1
                if length & 0x80:
                    length, at = _varint(raw, at - 1)
                if at + length > end:
                    raise DecodeError
                if length and (into := inner.get(tag >> 3)) is not None:
                    outer.append((end, inner))
                    end, inner = at + length, into.inner
                else:
                    at += length
            elif kind == _VARINT:
                at += 1
                if raw[at - 1] & 0x80:
                    at = _after(raw, at)
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            else:
                raise DecodeError


def _after(raw: bytes, at: int) -> int:
    """Where a number ends that had its first of ten bytes before `at`."""
    for end in range(at, at + 9):
        if raw[end] < 0x80:
            return end + 1
    raise DecodeError


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """A length or a tag, which have at most 32 bits, and where it ends."""
    value = 0
    for shift in range(0, 35, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 32:
                break
            return value, at
    raise DecodeError
