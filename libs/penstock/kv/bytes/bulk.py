"""Bulk bytes in messages, with as few copies as Python allows.

The stream of `Read` carries BlockBytes messages. Protobuf would copy the bytes twice on each side; here they are
encoded and decoded by hand: one copy out of the arena into the message, none out of the message. What is on the
wire is plain protobuf, which any other client may use instead.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from penstock.v1 import kvstore_pb2

_READ = "/penstock.v1.KvStore/Read"
_AT = 0x08
"""Tag of field 1, a number."""
_DATA = 0x12
"""Tag of field 2, bytes."""
_AT_BYTES, _LENGTH_BYTES = 9, 5
"""That these numbers have at most in what is decoded by hand; a larger one is left to protobuf."""

Part = tuple[int, memoryview]
"""Where a part begins, and its bytes."""


def encode(at: int, pieces: Sequence[memoryview]) -> bytes:
    """A BlockBytes message whose data are the pieces, one after the other."""
    head = bytearray()
    if at:
        head.append(_AT)
        _append_number(head, at)
    head.append(_DATA)
    _append_number(head, sum(piece.nbytes for piece in pieces))
    return b"".join((head, *pieces))


def decode(message: bytes) -> Part:
    """The content of a BlockBytes message; the bytes are a view of it. Raises ValueError when it is not one."""
    at = start = 0
    try:
        if message[:1] == bytes((_AT,)):
            at, start = _number(message, 1, _AT_BYTES)
        if message[start] == _DATA:
            length, begin = _number(message, start + 1, _LENGTH_BYTES)
            if begin + length == len(message):
                return at, memoryview(message)[begin:]
    except IndexError:
        pass
    return _decode_any(message)


def _decode_any(message: bytes) -> Part:
    """Decodes a message of another encoder, with its fields in any order."""
    try:
        parsed = kvstore_pb2.BlockBytes.FromString(message)
    except Exception as error:
        raise ValueError("not a BlockBytes message") from error
    return parsed.at, memoryview(parsed.data)


def _append_number(to: bytearray, number: int) -> None:
    while number > 0x7F:
        to.append(number & 0x7F | 0x80)
        number >>= 7
    to.append(number)


def _number(message: bytes, at: int, most: int) -> tuple[int, int]:
    """A number of up to `most` bytes, and where it ends. Raises IndexError where it has no end by then."""
    number = 0
    for shift in range(0, 7 * most, 7):
        byte = message[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise IndexError


def read_method(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamMultiCallable[kvstore_pb2.ReadRequest, bytes]:
    """The client's side of `Read`: a stream of messages for `decode`."""
    return channel.unary_stream(_READ, request_serializer=kvstore_pb2.ReadRequest.SerializeToString)


def serve_read(server: Any, behaviour: Callable[[kvstore_pb2.ReadRequest, Any], AsyncIterator[bytes]]) -> None:
    """The server's side of `Read`: `behaviour` yields encoded messages. Call it after the generated registration,
    whose `Read` it replaces."""
    _, service, method = _READ.split("/")
    handler = grpc.unary_stream_rpc_method_handler(behaviour, kvstore_pb2.ReadRequest.FromString, bytes)
    server.add_registered_method_handlers(service, {method: handler})
