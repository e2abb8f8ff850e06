"""Requests that were refused before they began: a short record for their tenant alone, and a count by reason."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import grpc
import httpx2
import pytest

from penstock.errors import InvalidRequest
from penstock.gateway.accounts.keys import new_key, write_keys
from penstock.gateway.mesh.plans import PlanStream
from penstock.v1 import gateway_pb2, gateway_pb2_grpc

from . import fakes

ROOM = 4
CHAT = "/v1/chat/completions"
BODY = {"model": fakes.MODEL, "messages": [{"role": "user", "content": "hello"}]}
KEYS = {"one": {"x-api-key": "one"}, "two": {"x-api-key": "two"}, "op": {"x-api-key": "op"}}


@pytest.fixture
async def http():
    async with httpx2.AsyncClient() as client:
        yield client


@pytest.fixture
async def tenants(opened, http, tmp_path):
    """A gateway of two tenants, of which one may send two requests per minute."""
    write_keys(tmp_path / "keys.json", [new_key("a", key="one")[1], new_key("b", key="two")[1], OPERATOR])
    (tmp_path / "terms.toml").write_text("[limits.b]\nrequests_per_minute = 2")
    settings = {"api_keys": tmp_path / "keys.json", "server_key": "ab" * 16, "terms": tmp_path / "terms.toml"}
    async with opened(**settings, max_live_requests=ROOM, api_key="one") as setup:
        http.base_url = setup.url
        yield setup


OPERATOR = new_key("ops", "operator", key="op")[1]


async def record(http, id: str, who: str) -> dict:
    answer = await http.get(f"/v1/requests/{id}", headers=KEYS[who])
    return answer.json() if answer.status_code == 200 else {}


def counted(setup, status: int, reason: str) -> float:
    labels = {"status": str(status), "reason": reason}
    return setup.gateway.metrics.registry.get_sample_value("penstock_requests_refused_total", labels) or 0.0


async def test_a_refused_request_has_a_record_of_its_tenant(tenants, http):
    wrong = await http.post(CHAT, json=BODY | {"n": "x" * 500}, headers=KEYS["one"] | {"x-request-id": "wrong"})
    missing = await http.post(CHAT, json=BODY | {"model": "other"}, headers=KEYS["one"] | {"x-request-id": "missing"})
    assert (wrong.status_code, missing.status_code) == (400, 404)
    for id, answer, param in (("wrong", wrong, "n"), ("missing", missing, "model")):
        found = await record(http, id, "one")
        error = answer.json()["error"]
        assert (found["status"], found["http_status"], found["tenant"]) == ("refused", answer.status_code, "a")
        assert (found["error"]["code"], found["error"]["param"]) == (error["code"], param)
        assert await record(http, id, "op") == found and await record(http, id, "two") == {}
    assert counted(tenants, 404, "model_not_found") == 1


async def test_limits_and_room_and_keys(tenants, http):
    for at in range(3):
        last = await http.post(CHAT, json=BODY, headers=KEYS["two"] | {"x-request-id": f"b{at}"})
    assert last.status_code == 429
    assert (await record(http, "b2", "two"))["error"]["code"] == "rate_limit_exceeded"
    assert (await record(http, "b1", "two"))["status"] == "completed"

    tenants.script.hang = True
    running = [asyncio.ensure_future(http.post(CHAT, json=BODY, headers=KEYS["one"], timeout=30)) for _ in range(ROOM)]
    await tenants.mesh.until(lambda: tenants.gateway.reception.admission.live == ROOM)
    full = await http.post(CHAT, json=BODY, headers=KEYS["one"] | {"x-request-id": "full"})
    tenants.script.gate.set()
    assert [full.status_code, *[(await one).status_code for one in running]] == [503] + ROOM * [200]
    assert (await record(http, "full", "one"))["http_status"] == 503

    await tenants.gateway.reception.admission.idle()
    kept = len(tenants.gateway.reception.refusals.past)
    assert (await http.post(CHAT, json=BODY, headers={"x-api-key": "none"})).status_code == 401
    assert len(tenants.gateway.reception.refusals.past) == kept, "nobody's"
    for status, reason in ((429, "rate_limit_exceeded"), (503, "overloaded"), (401, "invalid_api_key")):
        assert counted(tenants, status, reason) == 1


GENERATING = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages")
COUNTING = ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens")
COMPLEX = gateway_pb2.ChatCompletionRequest(messages=[gateway_pb2.ChatMessage()] * (1 << 18))
"""It has too many fields to be parsed, which is found out by reading it."""


async def fill(setup, http) -> list[asyncio.Task]:
    """Takes all places, with requests of one tenant that last until the gate is open."""
    setup.script.hang = True
    running = [asyncio.ensure_future(http.post(CHAT, json=BODY, headers=KEYS["one"], timeout=30)) for _ in range(ROOM)]
    await setup.mesh.until(lambda: setup.gateway.reception.admission.live == ROOM)
    return running


@pytest.fixture
async def full(tenants, http):
    """All places are taken by one tenant."""
    running = await fill(tenants, http)
    yield tenants
    tenants.script.gate.set()
    assert [(await one).status_code for one in running] == ROOM * [200]
    await tenants.gateway.reception.admission.idle()


async def asked(setup, request, key: str) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(setup.gateway.grpc_address) as channel:
        return await gateway_pb2_grpc.GatewayStub(channel).ChatCompletion(request, metadata=[("x-api-key", key)]).code()


@pytest.mark.parametrize("path", [*GENERATING, *COUNTING])
async def test_a_full_gateway_looks_at_the_key_first_and_reads_no_body(full, http, path):
    """The body that is announced never comes."""
    for key, status in (("none", 401), ("op", 403), ("one", 503), ("two", 503)):
        reader, writer = await asyncio.open_connection(full.gateway.address.host, full.gateway.address.port)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: 100000\r\n\r\n"
        writer.write(head.encode())
        async with asyncio.timeout(5):
            assert f" {status} ".encode() in await reader.readline(), key
        writer.close()
    assert counted(full, 401, "invalid_api_key") == 1 and counted(full, 503, "overloaded") == 2


async def test_grpc_looks_at_the_key_first_and_at_the_room_before_it_reads(full):
    small = gateway_pb2.ChatCompletionRequest()
    for request in (small, COMPLEX):
        assert await asked(full, request, "none") is grpc.StatusCode.UNAUTHENTICATED
        assert await asked(full, request, "op") is grpc.StatusCode.PERMISSION_DENIED
        assert await asked(full, request, "one") is grpc.StatusCode.RESOURCE_EXHAUSTED
    full.script.gate.set()
    await full.gateway.reception.admission.idle()
    assert await asked(full, COMPLEX, "none") is grpc.StatusCode.UNAUTHENTICATED
    assert await asked(full, COMPLEX, "one") is grpc.StatusCode.INVALID_ARGUMENT


async def test_who_is_refused_a_place_has_used_up_nothing_of_its_limits(full, http):
    body = {"model": fakes.MODEL, "prompt": "hello"}
    refused = [await http.post("/v1/completions", json=body, headers=KEYS["two"]) for _ in range(3)]
    assert [answer.status_code for answer in refused] == [503] * 3
    assert await asked(full, gateway_pb2.ChatCompletionRequest(), "two") is grpc.StatusCode.RESOURCE_EXHAUSTED
    full.script.gate.set()
    await full.gateway.reception.admission.idle()
    answers = [await http.post("/v1/completions", json=body, headers=KEYS["two"]) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_place_is_free_when_the_client_has_its_answer(opened, http, monkeypatch, stream):
    """Though the router has not taken leave yet."""

    async def farewell(*_, **__):
        await released.wait()

    released = asyncio.Event()
    monkeypatch.setattr(PlanStream, "farewell", farewell)
    async with opened(max_live_requests=1) as setup:
        for _ in range(2):
            answer = await http.post(f"{setup.url}{CHAT}", json=BODY | {"stream": stream})
            assert answer.status_code == 200
        assert setup.gateway.reception.admission.live == 0
        assert (await http.post(f"{setup.url}{CHAT}", json=BODY)).status_code == 503, "not without bound"
        released.set()


async def test_on_a_full_gateway_who_is_over_its_limit_hears_of_the_limit(tenants, http):
    for _ in range(2):
        assert (await http.post(CHAT, json=BODY, headers=KEYS["two"])).status_code == 200
    running = await fill(tenants, http)
    over = await http.post(CHAT, json=BODY, headers=KEYS["two"])
    tenants.script.gate.set()
    await asyncio.gather(*running)
    assert over.status_code == 429 and over.headers["x-ratelimit-remaining-requests"] == "0"
    assert int(over.headers["retry-after"]) > 1


async def test_counting_and_grpc_have_records_too(tenants, http):
    answer = await http.post("/tokenize", json={"nothing": 1}, headers=KEYS["one"] | {"x-request-id": "count"})
    assert answer.status_code == 400
    assert (await record(http, "count", "one"))["error"]["code"] == "unknown_parameter"
    async with grpc.aio.insecure_channel(tenants.gateway.grpc_address) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).ChatCompletion(
            gateway_pb2.ChatCompletionRequest(model="tiny"),
            metadata=[("x-api-key", "one"), ("x-request-id", "typed")],
        )
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (await record(http, "typed", "one"))["error"]["param"] == "messages"


async def test_a_request_that_ran_and_failed_is_no_refusal(tenants, http):
    tenants.script.refuse = None
    tenants.script.generate = lambda worker, request: InvalidRequest("no such thing", code="odd")
    answer = await http.post(CHAT, json=BODY, headers=KEYS["one"] | {"x-request-id": "ran"})
    assert answer.status_code == 400
    assert (await record(http, "ran", "one"))["status"] == "failed"
    assert len(tenants.gateway.reception.refusals.past) == 0


async def test_a_flood_of_refusals_leaves_the_records_of_others(tenants, http):
    for _ in range(2):
        assert (await http.post(CHAT, json=BODY, headers=KEYS["two"])).status_code == 200
    for at in range(3):
        over = await http.post(CHAT, json=BODY, headers=KEYS["two"] | {"x-request-id": f"b{at}"})
        assert over.status_code == 429
    for at in range(300):
        await http.post(CHAT, json={"n": at}, headers=KEYS["one"] | {"x-request-id": f"r{at}"})
    assert len(tenants.gateway.reception.refusals.past) == 256
    for at in range(3):
        assert (await record(http, f"b{at}", "two"))["http_status"] == 429
    assert await record(http, "r40", "one") == {} and (await record(http, "r299", "one"))["http_status"] == 400


async def test_a_flood_of_refusals_is_bounded_and_pushes_out_nothing_that_ran(tenants, http):
    await http.post(CHAT, json=BODY, headers=KEYS["one"] | {"x-request-id": "ran"})
    for at in range(300):
        await http.post(CHAT, json={"n": "x" * 300}, headers=KEYS["one"] | {"x-request-id": f"r{at}"})
    refused = tenants.gateway.reception.refusals.past
    assert len(refused) == 256 and refused.bytes < 256 * 1024
    assert (await record(http, "ran", "one"))["status"] == "completed" and await record(http, "r0", "one") == {}


async def test_one_tenants_slow_connections_leave_room_for_another(opened, http, tmp_path):
    """More bodies that never come than there are places: the other tenant is served at once."""
    write_keys(tmp_path / "keys.json", [new_key("a", key="one")[1], new_key("b", key="two")[1], OPERATOR])
    settings = {"api_keys": tmp_path / "keys.json", "server_key": "ab" * 16, "max_live_requests": 16}
    async with opened(**settings, api_key="one") as setup, AsyncExitStack() as stack:
        host, port = setup.gateway.address.split(":")
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-api-key: one\r\ncontent-length: 100\r\n\r\n{{"
        asked = []
        for _ in range(20):
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            writer.write(head.encode())
            asked.append(asyncio.ensure_future(reader.readline()))
            stack.callback(asked[-1].cancel)
        ended = asyncio.as_completed(asked, timeout=10)
        assert [await next(ended) for _ in range(6)] == [b"HTTP/1.1 503 Service Unavailable\r\n"] * 6
        assert setup.gateway.reception.admission.live == 14
        http.base_url = setup.url
        answers = await asyncio.gather(*(http.post(CHAT, json=BODY, headers=KEYS["two"], timeout=5) for _ in range(2)))
        assert [answer.status_code for answer in answers] == [200, 200]
