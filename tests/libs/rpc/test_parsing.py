"""Long requests are parsed beside whatever else the loop serves, and refused when they are made of too many fields."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidRequest
from penstock.rpc.channels import open_channels
from penstock.rpc.parsing import MAX_FIELDS, SHORT, Parser
from penstock.rpc.server import MAX_MESSAGE, serve
from penstock.v1 import gateway_pb2, kvstore_pb2

pytestmark = pytest.mark.attack


NAME = "toy.Typed"
CALLS = gateway_pb2.ChatMessage.DESCRIPTOR.fields_by_name["tool_calls"].number
MESSAGES = gateway_pb2.ChatCompletionRequest.DESCRIPTOR.fields_by_name["messages"].number
BIAS = gateway_pb2.ChatCompletionRequest.DESCRIPTOR.fields_by_name["logit_bias"].number


def field(number: int, content: bytes) -> bytes:
    """A field of the kind that has a length."""
    out = bytearray()
    for value in (number << 3 | 2, len(content)):
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out) + content


def filled(unit: bytes, size: int = MAX_MESSAGE - 64) -> bytes:
    return unit * (size // len(unit))


TOO_MANY = {
    "messages": filled(field(MESSAGES, b"")),
    "messages in a message": field(MESSAGES, filled(field(CALLS, b""))),
    "entries of a map": filled(field(BIAS, b"")),
    "unknown numbers": filled(b"\x80\x7d\x01"),
    "texts": filled(field(99, b"")),
}


def parser(message: Any = gateway_pb2.ChatCompletionRequest) -> Parser:
    return Parser(message.FromString)


async def parsed(raw: bytes, message: Any = gateway_pb2.ChatCompletionRequest) -> Any:
    one = parser(message)
    return await one.whole(one.short(raw))


@pytest.mark.parametrize("name", TOO_MANY)
async def test_a_request_of_too_many_fields_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"more than {MAX_FIELDS} fields"):
        await parsed(TOO_MANY[name])


async def test_long_requests_of_every_service_arrive_whole() -> None:
    text = gateway_pb2.ChatCompletionRequest(
        messages=[gateway_pb2.ChatMessage(role="user", content="word " * 700_000)],
        logit_bias={7: 1.0},
        stop_token_ids=range(10_000),
    )
    assert await parsed(text.SerializeToString()) == text
    keys = [bytes([number % 256]) * 32 for number in range(60_000)]
    announced = kvstore_pb2.AnnounceRequest(address="127.0.0.1:1", stored=keys, removed=keys)
    assert await parsed(announced.SerializeToString(), kvstore_pb2.AnnounceRequest) == announced
    chunks = kvstore_pb2.BlockChunks(chunks=[kvstore_pb2.BlockChunk(at=2**40, data=bytes(1 << 20))])
    assert await parsed(chunks.SerializeToString(), kvstore_pb2.BlockChunks) == chunks


NO_MESSAGES = {
    "a tag without an end": filled(b"\x80"),
    "a number without an end": b"\x08" + filled(b"\x80"),
    "a length without an end": b"\x0a" + filled(b"\xff"),
    "too short": field(MESSAGES, bytes(SHORT))[:-1],
    "groups": filled(b"\x0b\x0c"),
    "longer than what it is in": field(MESSAGES, field(CALLS, b"\x0a\x7f") + field(99, bytes(SHORT))),
}


@pytest.mark.parametrize("name", NO_MESSAGES)
async def test_what_is_no_message_is_refused_without_a_long_search(name: str) -> None:
    raw = NO_MESSAGES[name]
    begin = time.process_time()
    with pytest.raises(InvalidRequest, match="not a valid message"):
        await parsed(raw)
    assert time.process_time() - begin < 1


@given(st.binary(min_size=1, max_size=64))
def test_bytes_that_parse_are_never_refused_and_others_never_pass(unit: bytes) -> None:
    """The count follows the same grammar as the parser, whatever the bytes; groups excepted, which no client writes."""
    raw = field(MESSAGES, unit) + field(MESSAGES, bytes(0) + field(99, bytes(SHORT)))
    try:
        gateway_pb2.ChatCompletionRequest.FromString(raw)
    except DecodeError:
        with pytest.raises(InvalidRequest):
            asyncio.run(parsed(raw))
    else:
        if not any(byte & 7 in (3, 4) for byte in unit):
            asyncio.run(parsed(raw))


@asynccontextmanager
async def serving(**handlers: Any) -> AsyncIterator[tuple[grpc.aio.Channel, str]]:
    def register(server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))

    async with serve("127.0.0.1:0", register, [NAME]) as server, open_channels() as channels:
        yield channels.to(f"127.0.0.1:{server.port}", "worker"), f"/{NAME}"


class _Beside:
    """The longest time in which the loop served nobody."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last), now


async def held(work: Callable[[], Any]) -> float:
    """The longest hold of the loop while `work` is done."""
    beside = _Beside()
    watching = asyncio.ensure_future(beside.watch())
    await asyncio.sleep(0)
    await work()
    watching.cancel()
    return beside.longest


async def test_four_megabytes_of_messages_do_not_hold_the_loop() -> None:
    """Against what the parser itself takes for them on this machine, here and now."""
    raw = TOO_MANY["messages in a message"]
    begin = time.perf_counter()
    made = gateway_pb2.ChatCompletionRequest.FromString(raw)
    takes = time.perf_counter() - begin
    del made
    codes = []

    async def unary(request: Any, context: Any) -> bytes:
        return b""

    async def each(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield b""

    typed = gateway_pb2.ChatCompletionRequest.FromString
    methods = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary, request_deserializer=typed),
        "Each": grpc.stream_stream_rpc_method_handler(each, request_deserializer=typed),
    }
    async with serving(**methods) as (channel, at):

        async def send() -> None:
            codes.append(await channel.unary_unary(f"{at}/Unary")(raw).code())

        longest = min([await held(send) for _ in range(3)])
        assert await channel.unary_unary(f"{at}/Unary")(field(99, bytes(2 * SHORT))) == b""
        stream = channel.stream_stream(f"{at}/Each")()
        await stream.write(b"")
        await stream.write(field(99, bytes(2 * SHORT)))
        assert [await stream.read(), await stream.read()] == [b"", b""]
        await stream.write(raw)
        codes.append(await stream.code())
        checking = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert health_pb2.HealthCheckResponse.FromString(await checking(b"")).status
        assert await checking(field(99, bytes(2 * SHORT))).code() is not grpc.StatusCode.OK
    assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * 4
    assert longest < takes / 3
