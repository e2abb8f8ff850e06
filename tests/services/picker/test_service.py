"""The picker over real gRPC, by an Envoy's part of the protocol: every order of messages that HTTP may have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.picker import envoy
from penstock.picker.config import PickerConfig
from penstock.picker.picking import FEW
from penstock.picker.service import LIVENESS, READINESS, SERVICE, OpenPicker, open_picker
from penstock.rpc.server import RpcServer, serve
from penstock.runtime.config import ConfigError
from penstock.v1 import ext_proc_pb2, ext_proc_pb2_grpc, router_pb2, router_pb2_grpc

Request, Response = ext_proc_pb2.ProcessingRequest, ext_proc_pb2.ProcessingResponse
_FULL = ext_proc_pb2.ProtocolConfiguration(
    request_body_mode=ext_proc_pb2.FULL_DUPLEX_STREAMED, response_body_mode=ext_proc_pb2.FULL_DUPLEX_STREAMED
)


@dataclass
class FakeRouter(router_pb2_grpc.RouterServicer):
    """Says who is there."""

    told: router_pb2.MembersResponse = field(default_factory=router_pb2.MembersResponse)
    looks: int = 0
    looked: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def Members(self, request: router_pb2.MembersRequest, context: Any) -> router_pb2.MembersResponse:
        async with self.looked:
            self.looks += 1
            self.looked.notify_all()
        return self.told

    async def seen(self) -> None:
        """Returns when what is told now has been looked at whole: the look after the next one has begun."""
        async with self.looked:
            until = self.looks + 2
            await self.looked.wait_for(lambda: self.looks >= until)


@dataclass
class Setup:
    """A picker before gateways that answer health alone."""

    open: OpenPicker
    router: FakeRouter
    gateways: dict[str, RpcServer]
    """By HTTP address."""
    stub: Any
    health: Any
    addresses: list[str]

    @property
    def waiting(self) -> dict[str, int]:
        return {gateway: count for gateway, count in self.open.picker.waiting.items() if count}

    def queue(self, *seconds: float, **other: Any) -> None:
        """Decode workers have queues so long."""
        del self.router.told.members[:]
        for queue_s in seconds:
            self.router.told.members.add(role=router_pb2.ROLE_DECODE, queue_s=queue_s, **other)


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[Setup]]]:
    async with AsyncExitStack() as stack:

        async def made(gateways: int = 3, **settings: Any) -> Setup:
            router, servers = FakeRouter(), {}

            def register(server: grpc.aio.Server) -> None:
                router_pb2_grpc.add_RouterServicer_to_server(router, server)

            served = await stack.enter_async_context(serve("127.0.0.1:0", register, []))
            for number in range(1, gateways + 1):
                server = await stack.enter_async_context(serve("127.0.0.1:0", lambda _: None, []))
                await server.set_serving(True)
                http = f"127.0.0.{number}:8080"
                servers[http] = server
                router.told.gateways.add(address=f"127.0.0.1:{server.port}", http_address=http)
            config = PickerConfig(
                router=(f"127.0.0.1:{served.port}",), address="127.0.0.1:0", **{"look_s": 0.01, **settings}
            )
            picker = await stack.enter_async_context(open_picker(config))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(picker.address))
            stub: Any = ext_proc_pb2_grpc.ExternalProcessorStub(channel)
            await router.seen()
            return Setup(picker, router, servers, stub, health_pb2_grpc.HealthStub(channel), list(servers))

        yield made


@pytest.fixture
async def setup(start: Callable[..., Awaitable[Setup]]) -> Setup:
    return await start()


def headers(*, end: bool = False, full: bool = True, subset: Any = None, **given: str) -> Request:
    """The first message of a stream."""
    sent = {":method": "POST", ":path": "/v1/chat/completions", **given}
    found = ext_proc_pb2.HeaderMap(
        headers=[
            ext_proc_pb2.HeaderValue(key=name.replace("_", "-"), raw_value=value.encode())
            for name, value in sent.items()
        ]
    )
    request = Request(request_headers=ext_proc_pb2.HttpHeaders(headers=found, end_of_stream=end))
    if full:
        request.protocol_config.CopyFrom(_FULL)
    if subset is not None:
        hint = Struct()
        hint.update({envoy.SUBSET: subset})
        request.metadata_context.filter_metadata["envoy.lb.subset_hint"].CopyFrom(hint)
    return request


def body(data: bytes, *, end: bool = False, answer: bool = False) -> Request:
    chunk = ext_proc_pb2.HttpBody(body=data, end_of_stream=end)
    return Request(response_body=chunk) if answer else Request(request_body=chunk)


def trailers(*, answer: bool = False) -> Request:
    found = ext_proc_pb2.HttpTrailers()
    return Request(response_trailers=found) if answer else Request(request_trailers=found)


def answer_headers(served: str = "") -> Request:
    request = Request(response_headers=ext_proc_pb2.HttpHeaders())
    if served:
        told = Struct()
        told.update({envoy.SERVED: served})
        request.metadata_context.filter_metadata["envoy.lb"].CopyFrom(told)
    return request


@contextmanager
def stream(setup: Setup) -> Iterator[Any]:
    call = setup.stub.Process()
    try:
        yield call
    finally:
        call.cancel()


async def say(call: Any, request: Request) -> Response:
    """One message, and its answer."""
    await call.write(request)
    async with asyncio.timeout(20):
        answer = await call.read()
    assert isinstance(answer, Response), "the stream has ended"
    return answer


async def pick(setup: Setup, **given: Any) -> Response:
    """The answer to the headers of a request that then goes away."""
    with stream(setup) as call:
        return await say(call, headers(**given))


def endpoints(answer: Response) -> list[str]:
    """Where the request is to go; header and metadata agree."""
    assert answer.WhichOneof("response") == "request_headers"
    [option] = answer.request_headers.response.header_mutation.set_headers
    assert option.header.key == envoy.ENDPOINT and option.append_action == option.OVERWRITE_IF_EXISTS_OR_ADD
    assert answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields[envoy.ENDPOINT].string_value == (
        option.header.raw_value.decode()
    )
    return option.header.raw_value.decode().split(",")


def refused(answer: Response) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, error and headers."""
    assert answer.WhichOneof("response") == "immediate_response"
    immediate = answer.immediate_response
    sent = {one.header.key: one.header.raw_value.decode() for one in immediate.headers.set_headers}
    return immediate.status.code, json.loads(immediate.body)["error"], sent


async def test_headers_alone(setup: Setup) -> None:
    """A GET has no body."""
    with stream(setup) as call:
        chosen = endpoints(await say(call, headers(end=True)))
        assert sorted(chosen) == setup.addresses
        await call.done_writing()
        assert await call.read() == grpc.aio.EOF
        assert await call.code() == grpc.StatusCode.OK


@pytest.mark.parametrize("ends_with", ["body", "empty body", "trailers"])
async def test_bodies_and_trailers_come_back_as_they_went(setup: Setup, ends_with: str) -> None:
    chunks = [b'{"model": ', b'"m", "messages"', b": []}"]
    with stream(setup) as call:
        endpoints(await say(call, headers()))
        sent = [body(chunk, end=ends_with == "body" and chunk is chunks[-1]) for chunk in chunks]
        if ends_with == "empty body":
            sent.append(body(b"", end=True))
        for request in sent:
            back = (await say(call, request)).request_body.response.body_mutation.streamed_response
            assert (back.body, back.end_of_stream) == (request.request_body.body, request.request_body.end_of_stream)
        if ends_with == "trailers":
            assert (await say(call, trailers())).WhichOneof("response") == "request_trailers"
        assert (await say(call, answer_headers())).WhichOneof("response") == "response_headers"
        for text, end in ((b"data: {}\n\n", False), (b"data: [DONE]\n\n", True)):
            told = (await say(call, body(text, end=end, answer=True))).response_body.response.body_mutation
            assert (told.streamed_response.body, told.streamed_response.end_of_stream) == (text, end)
        assert (await say(call, trailers(answer=True))).WhichOneof("response") == "response_trailers"


async def test_chunks_may_come_before_any_answer_is_read(setup: Setup) -> None:
    sent = [headers(), *(body(bytes([number]) * 1000) for number in range(100)), body(b"", end=True)]

    async def all_at_once() -> AsyncIterator[Request]:
        for request in sent:
            yield request

    answers = [answer async for answer in setup.stub.Process(all_at_once())]
    assert answers[0].WhichOneof("response") == "request_headers"
    back = [one.request_body.response.body_mutation.streamed_response.body for one in answers[1:]]
    assert back == [one.request_body.body for one in sent[1:]]


@pytest.mark.parametrize("data", [b"{not json", b"\xff\xfe\x00", b""], ids=["malformed", "binary", "empty"])
async def test_a_body_is_not_read(setup: Setup, data: bytes) -> None:
    """The gateway says what is wrong with it."""
    with stream(setup) as call:
        endpoints(await say(call, headers()))
        back = (await say(call, body(data, end=True))).request_body.response.body_mutation.streamed_response
        assert (back.body, back.end_of_stream) == (data, True)


async def test_a_huge_body_passes_and_is_not_kept(setup: Setup) -> None:
    chunk = b"x" * (1 << 20)
    with stream(setup) as call:
        endpoints(await say(call, headers()))
        for number in range(64):
            back = await say(call, body(chunk, end=number == 63))
            assert back.request_body.response.body_mutation.streamed_response.body == chunk


async def test_an_envoy_that_keeps_the_body_gets_none_back(setup: Setup) -> None:
    """STREAMED and BUFFERED, as the first message says."""
    first = headers(full=False)
    first.protocol_config.request_body_mode = ext_proc_pb2.BUFFERED
    with stream(setup) as call:
        endpoints(await say(call, first))
        assert (await say(call, body(b"{}", end=True))) == Response(
            request_body=ext_proc_pb2.BodyResponse(response=ext_proc_pb2.CommonResponse())
        )


async def test_an_envoy_that_does_not_say_gets_it_back(setup: Setup) -> None:
    with stream(setup) as call:
        endpoints(await say(call, headers(full=False)))
        back = (await say(call, body(b"{}", end=True))).request_body.response.body_mutation.streamed_response
        assert back.body == b"{}"


async def test_a_message_of_nothing_is_refused(setup: Setup) -> None:
    with stream(setup) as call:
        await call.write(Request())
        with pytest.raises(grpc.aio.AioRpcError, match="request: must have headers"):
            await call.read()
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_session_stays_at_its_gateway(setup: Setup) -> None:
    for name in ("x_session_affinity", "x_claude_code_session_id", "x_dynamo_session_id"):
        chosen = {endpoints(await pick(setup, **{name: "a chat"}))[0] for _ in range(3)}
        assert len(chosen) == 1
    homes = {endpoints(await pick(setup, x_session_affinity=f"chat {number}"))[0] for number in range(40)}
    assert homes == set(setup.addresses)


async def test_what_waits_counts_until_its_answer_begins(setup: Setup) -> None:
    with stream(setup) as first, stream(setup) as second:
        one, two = [endpoints(await say(call, headers()))[0] for call in (first, second)]
        assert one != two and setup.waiting == {one: 1, two: 1}
        await say(first, answer_headers(served=one))
        assert setup.waiting == {two: 1}
        await say(second, answer_headers(served=one))
        assert setup.waiting == {}
    served = setup.open.metrics.registry.get_sample_value
    assert served("penstock_picks_served_total", {"by": "picked"}) == 1
    assert served("penstock_picks_served_total", {"by": "other"}) == 1


async def test_a_session_whose_gateway_has_too_much_goes_to_another(setup: Setup) -> None:
    calls = [setup.stub.Process() for _ in range(3 * FEW)]
    chosen = [endpoints(await say(call, headers(x_session_affinity="busy")))[0] for call in calls]
    assert len(set(chosen[:FEW])) == 1 and set(chosen) == set(setup.addresses)
    for call in calls:
        call.cancel()


async def test_an_envoy_that_goes_away_leaves_nothing(setup: Setup) -> None:
    call = setup.stub.Process()
    endpoints(await say(call, headers()))
    assert sum(setup.waiting.values()) == 1
    call.cancel()
    async with asyncio.timeout(20):
        while setup.waiting:
            await asyncio.sleep(0)
            await setup.router.seen()


@pytest.mark.parametrize("as_text", [False, True])
async def test_only_of_the_subset_that_envoy_names(setup: Setup, as_text: bool) -> None:
    allowed = setup.addresses[1:]
    for number in range(20):
        given = ", ".join(allowed) if as_text else allowed
        assert sorted(endpoints(await pick(setup, subset=given, x_session_affinity=f"{number}"))) == allowed


@pytest.mark.parametrize("subset", [[], "", ["10.9.9.9:8080"]])
async def test_of_a_subset_without_gateways_nothing_is_picked(setup: Setup, subset: Any) -> None:
    status, error, sent = refused(await pick(setup, subset=subset))
    assert (status, error["code"], sent["retry-after"]) == (503, "no_endpoint", "1")


async def test_a_refusal_ends_the_stream(start: Callable[..., Awaitable[Setup]]) -> None:
    setup = await start(gateways=0)
    with stream(setup) as call:
        status, error, sent = refused(await say(call, headers()))
        assert (status, error["type"], sent["content-type"]) == (503, "server_error", "application/json")
        assert await call.read() == grpc.aio.EOF
        assert await call.code() == grpc.StatusCode.OK


async def test_a_gateway_that_drains_gets_nothing(setup: Setup) -> None:
    leaving = setup.addresses[0]
    await setup.gateways[leaving].set_serving(False)
    await setup.router.seen()
    assert sorted(endpoints(await pick(setup))) == setup.addresses[1:]
    await setup.gateways[leaving].set_serving(True)
    await setup.router.seen()
    assert sorted(endpoints(await pick(setup))) == setup.addresses


async def test_a_gateway_without_an_address_of_its_own_is_left_out(setup: Setup) -> None:
    setup.router.told.gateways[0].http_address = "0.0.0.0:8080"
    await setup.router.seen()
    assert sorted(endpoints(await pick(setup))) == setup.addresses[1:]


async def test_full_workers_shed(setup: Setup) -> None:
    setup.queue(130.0, 127.0)
    await setup.router.seen()
    status, error, sent = refused(await pick(setup))
    assert (status, error["code"], sent["retry-after"]) == (429, "queue_full", "7")
    setup.queue(130.0, 1.0)
    await setup.router.seen()
    assert endpoints(await pick(setup))
    setup.queue(0.0, draining=True)
    setup.router.told.members.add(role=router_pb2.ROLE_BOTH, queue_s=500.0)
    setup.router.told.members.add(role=router_pb2.ROLE_PREFILL, queue_s=0.0)
    await setup.router.seen()
    assert refused(await pick(setup))[0] == 429, "nobody else may take it"
    assert setup.open.metrics.registry.get_sample_value("penstock_picks_total", {"outcome": "queue_full"}) == 2


async def test_health_has_the_names_of_the_protocol(setup: Setup) -> None:
    for name in ("", SERVICE, READINESS, LIVENESS):
        answer = await setup.health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert SERVICE == "envoy.service.ext_proc.v3.ExternalProcessor"


async def test_without_a_router_it_is_live_and_not_ready() -> None:
    async with open_picker(PickerConfig(router=("127.0.0.1:1",), address="127.0.0.1:0", look_s=0.01)) as picker:
        async with grpc.aio.insecure_channel(picker.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for name, status in ((LIVENESS, "SERVING"), (READINESS, "NOT_SERVING")):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.ServingStatus.Value(status)


def test_settings_that_can_not_be() -> None:
    for settings, named in (({}, "router"), ({"router": "r:1", "most_over": 0.5}, "most_over")):
        with pytest.raises(ConfigError, match=named):
            PickerConfig(**settings)  # type: ignore[arg-type]


async def test_a_router_that_starts_again_makes_no_gateway_go(setup: Setup) -> None:
    """It knows none at first."""
    known = list(setup.router.told.gateways)
    del setup.router.told.gateways[:]
    await setup.router.seen()
    assert setup.open.picker.seen.gateways == tuple(sorted(setup.gateways))
    setup.router.told.gateways.append(known[0])
    await setup.router.seen()
    assert setup.open.picker.seen.gateways == tuple(sorted(setup.gateways))
    await next(iter(setup.gateways.values())).set_serving(False)
    await setup.router.seen()
    assert len(setup.open.picker.seen.gateways) == len(setup.gateways) - 1
