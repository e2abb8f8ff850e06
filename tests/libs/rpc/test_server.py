"""Serving over real sockets: health, limits, errors, cancellation, drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from tests.libs.rpc.toy import NAME, Client, Toy, served
from tests.services.kvstore.relay import relay_to

from penstock.errors import Overloaded
from penstock.rpc.channels import open_channels
from penstock.rpc.context import safe_request_id
from penstock.rpc.errors import from_rpc
from penstock.rpc.server import LIVE, serve
from penstock.runtime.config import ConfigError
from penstock.runtime.context import request_scope


async def health(client: Client, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(client.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_all_four_shapes_of_calls() -> None:
    async with served(Toy()) as client:
        with request_scope("r-1"):
            assert (await client.ask(b"x")).startswith(b"r-1 ")
        echo = client.echo()
        await echo.write(b"a")
        assert await echo.read() == b"a"
        await echo.done_writing()
        assert await echo.read() is grpc.aio.EOF

        async def numbers() -> object:
            for number in (b"1", b"2"):
                yield number

        assert await client.total(numbers()) == b"3"


async def test_health_follows_serving_and_knows_the_services() -> None:
    async with served(Toy()) as client:
        assert await health(client) == await health(client, NAME) == health_pb2.HealthCheckResponse.SERVING
        await client.server.set_serving(False)
        assert await health(client) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health(client, LIVE) == health_pb2.HealthCheckResponse.SERVING, "it may take requests again"
        await client.server.set_live(False)
        assert await health(client, LIVE) == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError):
            await health(client, "unheard.Of")


class Wordy(Toy):
    """Says more than gRPC keeps for a client."""

    async def count(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"x" * 10_000
        self.cleaned += 1


async def test_calls_that_nobody_reads_end_and_keep_nobody_out() -> None:
    async with served(Wordy(), stall_s=0.2, first_s=1.0, max_calls=4) as client:
        options = [("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{client.server.port}", options=options) as channel:
            unread = [channel.unary_stream(f"/{NAME}/Count")(b"1") for _ in range(4)]
            refused = None
            async with asyncio.timeout(20):
                while True:
                    try:
                        await client.ask(b"x")
                    except grpc.aio.AioRpcError as error:
                        refused = error
                    else:
                        if refused is not None:
                            break
                    await asyncio.sleep(0.01)
            assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, "as long as they were at work"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in unread[0]:
                    pass
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert from_rpc(caught.value).code == "not_read"
            async with asyncio.timeout(10):
                while client.server.in_flight.count != 3:  # nobody can end the others before their clients do
                    await asyncio.sleep(0)
    assert client.server.in_flight.count == 0


async def test_who_watches_the_health_hears_all_and_holds_nobody_up() -> None:
    """Nobody waits for an hour: the stream ends before the grace of running calls does."""
    request = health_pb2.HealthCheckRequest(service=NAME)
    async with open_channels() as channels:
        async with served(Toy(), grace=3600) as client:
            channel = channels.to(f"127.0.0.1:{client.server.port}", "worker")
            watch = health_pb2_grpc.HealthStub(channel).Watch(request)
            seen = [(await watch.read()).status]
            await client.server.set_serving(False)
            seen.append((await watch.read()).status)
            await client.server.set_serving(True)
            seen.append((await watch.read()).status)
            unknown = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="unheard.Of"))
            assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        seen.append((await watch.read()).status)
        assert seen == [serving, not_serving, serving, not_serving]
        assert await watch.read() is grpc.aio.EOF


async def test_our_errors_arrive_whole_and_others_tell_nothing() -> None:
    async with served(Toy()) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.ask(b"refuse")
        error = from_rpc(caught.value)
        assert (type(error), error.field, error.retry_after) == (Overloaded, "n", 2.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.ask(b"break")
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, "internal error")
        stream = client.count(3)
        assert [await stream.read() for _ in range(3)] == [b"0", b"1", b"2"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert from_rpc(caught.value).retry_after == 2.0
        assert client.server.in_flight.count == 0


async def test_calls_over_the_limit_are_refused_at_once() -> None:
    toy = Toy()
    async with served(toy, max_calls=1, grace=0) as client:
        waiting = client.ask(b"wait")
        await toy.started.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.ask(b"x")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        waiting.cancel()


async def test_one_connection_has_so_many_streams_and_another_its_own() -> None:
    toy = Toy()
    async with served(toy, max_streams=2, grace=0) as client, open_channels() as others:
        first = [await _echoing(client, b"a") for _ in range(2)]
        waits = client.echo()
        writing = asyncio.ensure_future(waits.write(b"b"))
        await _echoing(Client(client.server, others), b"c")
        assert client.server.in_flight.count == 3
        first[0].cancel()
        await writing
        assert await waits.read() == b"b"


async def _echoing(client: Client, word: bytes) -> Any:
    """A stream that is open on both sides."""
    stream = client.echo()
    await stream.write(word)
    assert await stream.read() == word
    return stream


async def _never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def test_calls_that_send_nothing_hold_no_place() -> None:
    """Each shape, and health; who calls properly is served meanwhile."""
    toy = Toy()
    async with served(toy, first_s=0.3, max_calls=8) as client, open_channels() as others:
        channel = others.to(f"127.0.0.1:{client.server.port}", "worker")
        methods = (f"/{NAME}/Ask", f"/{NAME}/Count", "/grpc.health.v1.Health/Check")
        stuck = [channel.stream_stream(method)(_never()) for method in methods]
        assert (await client.ask(b"x")).startswith(b" ")
        assert [await call.code() for call in stuck] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 3
        assert client.server.in_flight.count == 0
        assert await health(client) == health_pb2.HealthCheckResponse.SERVING
        count = client.count(2)
        assert [await count.read(), await count.read()] == [b"0", b"1"]
        count.cancel()
        for method in methods:
            empty = channel.stream_stream(method)(iter(()))
            assert await empty.code() is grpc.StatusCode.INVALID_ARGUMENT, method


async def test_health_and_reflection_have_a_few_callers_where_strangers_reach_them() -> None:
    async with served(Toy(), first_s=0.5, max_calls=256) as client, open_channels() as others:
        channel = others.to(f"127.0.0.1:{client.server.port}", "worker")
        watching = [
            health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME)) for _ in range(40)
        ]
        read = await asyncio.gather(*(call.read() for call in watching), return_exceptions=True)
        refused = [one for one in read if isinstance(one, grpc.aio.AioRpcError)]
        assert len(refused) == 8
        assert {one.code() for one in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert (await client.ask(b"x")).startswith(b" ")
        for call in watching:
            call.cancel()
        info = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(_never())
        assert await info.code() is grpc.StatusCode.OK, "a stream that asks for nothing ends"


async def test_a_peer_that_falls_silent_is_gone_after_a_quarter_minute_for_both_sides() -> None:
    """Without a word of TCP, as when a process hangs or a cable is pulled."""
    toy = Toy()
    async with served(toy, grace=0) as client, relay_to(f"127.0.0.1:{client.server.port}") as relay:
        async with open_channels() as channels:
            stream = channels.to(relay.address, "worker").stream_stream(f"/{NAME}/Echo")()
            await stream.write(b"a")
            assert await stream.read() == b"a"
            relay.stall()
            async with asyncio.timeout(30):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stream.read()
                await client.server.in_flight.idle()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert toy.cleaned == 1


@pytest.mark.parametrize("end", ["cancel", "deadline"])
async def test_a_client_that_leaves_frees_the_handler(end: str) -> None:
    toy = Toy()
    async with served(toy) as client:
        call = client.ask(b"wait", timeout=0.2 if end == "deadline" else None)
        await toy.started.wait()
        if end == "cancel":
            call.cancel()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await call
        await client.server.in_flight.idle()
        assert toy.cleaned == 1


async def test_leaving_waits_until_handlers_have_cleaned_up() -> None:
    toy = Toy()
    toy.cleaning_takes = asyncio.Event()
    async with served(toy, grace=0) as client:
        stream = client.count(1)
        assert await stream.read() == b"0"
        await toy.started.wait()
        asyncio.get_running_loop().call_later(0.05, toy.cleaning_takes.set)
    assert toy.cleaned == 1


async def test_running_calls_get_their_grace() -> None:
    async with open_channels() as channels:  # open until the answer is read, which may be after the server has ended
        async with serve("127.0.0.1:0", Toy().register, [NAME], grace=10) as server:
            echo = Client(server, channels).echo()
            await echo.write(b"a")
            assert await echo.read() == b"a"
            leaving = asyncio.ensure_future(_finish(echo))
        assert await leaving is grpc.aio.EOF


async def _finish(echo: object) -> object:
    await echo.done_writing()  # type: ignore[attr-defined]
    return await echo.read()  # type: ignore[attr-defined]


async def test_a_taken_address_is_a_setting_to_correct(capfd: pytest.CaptureFixture[str]) -> None:
    async with served(Toy()) as client:
        address = f"127.0.0.1:{client.server.port}"
        with pytest.raises(ConfigError, match="cannot listen there"):
            async with serve(address, Toy().register, [NAME]):
                pass


async def test_a_trace_goes_through() -> None:
    tracer = TracerProvider().get_tracer("test")
    async with served(Toy()) as client:
        with tracer.start_as_current_span("edge") as span:
            answer = await client.ask(b"x", ("x-request-id", "abc"))
            expected = f"{span.get_span_context().trace_id:032x}"
        assert answer.decode() in (f"abc {expected}", "abc ")
        assert trace.get_current_span().get_span_context().trace_id == 0


async def test_a_channel_is_shared_and_can_be_forgotten() -> None:
    async with served(Toy()) as client:
        address = f"127.0.0.1:{client.server.port}"
        assert client.channels.to(address, "worker") is client.channel
        await client.channels.forget(address)
        await client.channels.forget("never:1")
        assert client.channels.to(address, "worker") is not client.channel


@pytest.mark.parametrize("text", ["", None, "a b", "a" * 129, "a\n", "ä"])
def test_unsafe_request_ids_are_not_taken_over(text: str | None) -> None:
    assert safe_request_id(text) is None
    assert safe_request_id("req_1.2:3-4") == "req_1.2:3-4"
