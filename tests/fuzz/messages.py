"""What members of a mesh send each other, and what gateways are asked over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import xxhash
from google.protobuf.message import DecodeError, Message

from penstock.errors import InvalidRequest, Unavailable
from penstock.gateway.door import rpc_asks
from penstock.kv.bytes.bulk import decode
from penstock.kvstore.messages import (
    lent_from_message,
    pace_from_message,
    pages_from_message,
    touched_from_message,
    wanted_from_message,
    written_from_message,
)
from penstock.kvstore.receiving import BlockReceiver
from penstock.kvstore.table.blocks import Written
from penstock.router.messages import ask, hints, member
from penstock.router.shared.records import (
    ForeignState,
    pack,
    pack_record,
    unpack_booking,
    unpack_facts,
    unpack_record,
)
from penstock.rpc.parsing import SHORT, Parser
from penstock.runtime.addresses import UnixPath, socket_address
from penstock.v1 import common_pb2, gateway_pb2, kvstore_pb2, router_pb2
from penstock.worker.convert import order_from_message, token_from_message
from penstock.worker.pictures import HeldPictures

from .contract import LOOP_S, Contract, plain

WORDS = (
    b"\x08",
    b"\x12\x20",
    b"\x0a\x00",
    b"\xff" * 9 + b"\x01",
    b"\x80",
    b"k" * 32,
    b"\x1a\x10",
    b"/proc/1/fd/3",
    b"a:1",
)


def order(request: common_pb2.Request) -> object:
    """Of a worker that has been shown no picture."""
    try:
        return order_from_message(request, HeldPictures(0))
    except Unavailable as error:
        assert request.pictures, error
        return None


BLOCK = 48
"""Bytes of the blocks that are sent in chunks here."""


def each(*readers: tuple[type[Message], Callable[[Any], object]]) -> Callable[[bytes], None]:
    """The same bytes as messages of several types, each with its reader."""

    def check(data: bytes) -> None:
        for kind, read in readers:
            try:
                read(kind.FromString(data))
            except (DecodeError, InvalidRequest) as error:
                assert isinstance(error, DecodeError) or error.message

    return check


def _block_bytes(data: bytes) -> None:
    """As protobuf reads it."""
    try:
        expected = kvstore_pb2.BlockBytes.FromString(data)
    except DecodeError:
        expected = None
    at, content = decode(data)
    assert expected is not None and (at, bytes(content)) == (expected.at, expected.data)


class _OneBlock:
    """A store with one reserved block."""

    def __init__(self) -> None:
        self.memory = bytearray(BLOCK)
        self.committed = 0
        puts = SimpleNamespace(find=self._find, commit=self._commit)
        table = SimpleNamespace(block_bytes=BLOCK, puts=puts)
        self.host = SimpleNamespace(table=table, view=lambda found: memoryview(self.memory))

    def now(self) -> float:
        return 0.0

    def _find(self, attachment: str, key: bytes, epoch: int, now: float) -> object:
        return self if epoch == 1 else None

    def _commit(self, attachment: str, blocks: Sequence[Written], now: float) -> list[bool]:
        [block] = blocks
        if block.checksum:
            assert block.checksum == xxhash.xxh3_128(self.memory).digest(), "what is committed is what came"
        return [bool(block.checksum)]


def _block_chunks(data: bytes) -> None:
    """As the servicer takes them."""
    message = kvstore_pb2.BlockChunks.FromString(data)
    store = _OneBlock()
    receiver = BlockReceiver(lambda attachment: store)  # type: ignore[arg-type, return-value]
    for chunk in message.chunks:
        if chunk.HasField("block"):
            receiver.begin(chunk.attachment_id, written_from_message("block", chunk.block))
        receiver.add(chunk.at, chunk.data)
    assert len(receiver.finish()) == sum(chunk.HasField("block") for chunk in message.chunks)


def _long_message(data: bytes) -> None:
    """A long request is what protobuf reads, or it is refused; a short one is parsed as it is."""
    parser = Parser(gateway_pb2.ChatCompletionRequest.FromString)
    raw = data + b"\x9a\x06" + bytes((0x80 | SHORT & 0x7F, 0x80 | SHORT >> 7 & 0x7F, SHORT >> 14)) + bytes(SHORT)
    found = asyncio.run(parser.whole(parser.short(raw)))
    assert found == gateway_pb2.ChatCompletionRequest.FromString(raw)


def _state(data: bytes) -> None:
    """What routers keep in Redis: it comes back as it was, or is named foreign."""
    foreign = 0
    for read in (_facts, _booking, _record):
        try:
            read(data)
        except ForeignState as error:
            assert str(error)
            foreign += 1
    assert foreign >= 2, "one thing is not two"


def _facts(data: bytes) -> None:
    facts = unpack_facts(data)
    assert unpack_facts(pack(facts)) == facts


def _booking(data: bytes) -> None:
    booking = unpack_booking(data)
    assert unpack_booking(pack(booking)) == booking


def _record(data: bytes) -> None:
    record, stamp = unpack_record(data)
    assert unpack_record(pack_record(record, stamp)) == (record, stamp)


def _address(data: bytes) -> None:
    address = socket_address(data.decode(errors="replace"))
    if isinstance(address, UnixPath):
        assert address.path.startswith("/")
    else:
        assert 0 <= address.port <= 65535 and address.host and address.at(1).host == address.host


CONTRACTS = (
    Contract(
        name="block_bytes",
        opened=plain(_block_bytes),
        refusals=(ValueError,),
        words=WORDS,
        seconds=LOOP_S,
        examples=400,
    ),
    Contract(
        name="block_chunks",
        opened=plain(_block_chunks),
        refusals=(DecodeError, InvalidRequest),
        words=WORDS,
        seconds=5 * LOOP_S,
        examples=300,
    ),
    Contract(
        name="store_messages",
        opened=plain(
            each(
                (kvstore_pb2.ReserveRequest, wanted_from_message),
                (kvstore_pb2.TouchRequest, touched_from_message),
                (kvstore_pb2.LendRequest, lent_from_message),
                (kvstore_pb2.ClientPages, pages_from_message),
                (kvstore_pb2.Pace, lambda pace: pace_from_message("pace", pace)),
            )
        ),
        refusals=(),
        words=WORDS,
        seconds=10 * LOOP_S,
        examples=300,
    ),
    Contract(
        name="router_messages",
        opened=plain(each((router_pb2.PlanAsk, ask), (router_pb2.Hello, member), (common_pb2.HintRequest, hints))),
        refusals=(),
        words=WORDS,
        seconds=10 * LOOP_S,
        examples=300,
    ),
    Contract(
        name="worker_messages",
        opened=plain(each((common_pb2.Request, order), (common_pb2.Token, token_from_message))),
        refusals=(),
        words=WORDS,
        seconds=10 * LOOP_S,
        examples=300,
    ),
    Contract(
        name="gateway_messages",
        opened=plain(
            each(
                (gateway_pb2.ChatCompletionRequest, lambda asked: rpc_asks.read_chat(asked, 4)),
                (gateway_pb2.CompletionRequest, lambda asked: rpc_asks.read_completion(asked, 4)),
            )
        ),
        refusals=(),
        words=(*WORDS, b'{"type": "object"}', b'{"a": 1e999}', b"\x52\x03"),
        examples=300,
    ),
    Contract(name="long_message", opened=plain(_long_message), words=WORDS, examples=200),
    Contract(
        name="router_state",
        opened=plain(_state),
        refusals=(),
        words=(
            b"\x92\x01",
            b"\x91",
            b"\xa1b",
            b"\xa1f",
            b"\xc1",
            b"\xcf" + b"\xff" * 8,
            b"PS1:",
            b"\xcb\x7f\xf8" + bytes(6),
        ),
        seconds=5 * LOOP_S,
        examples=400,
    ),
    Contract(
        name="address",
        opened=plain(_address),
        refusals=(ValueError,),
        words=(b"unix:", b"/", b"[::1]", b":", b"%", b"\n", b"65536", b"\xd9\xa1"),
        seconds=LOOP_S,
    ),
)
