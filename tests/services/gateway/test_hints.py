"""What the gateway tells the router of sessions: by itself, and in the words of a client."""

from __future__ import annotations

import json
from typing import Any

import grpc
import httpx2
import pytest

from penstock.gateway.accounts.auth import session_digest
from penstock.testing.keys import key_file
from penstock.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

from .fakes import MODEL

USER: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
SESSION = {"x-session-affinity": "talk"}


def digest(key: str, tenant: str = "default") -> str:
    return session_digest(tenant, {"x-session-affinity": key}, None)


async def told(setup) -> list[tuple[int, float | None]]:
    """State and expected return of each hint, once every stream has ended."""
    await setup.mesh.until(lambda: setup.mesh.live == 0)
    said = setup.mesh.router.hints
    return [(hint.state, hint.returns_in_s if hint.HasField("returns_in_s") else None) for hint in said]


async def test_an_answer_waits_for_the_user_and_a_call_for_its_tool(setup) -> None:
    await setup.client.chat.completions.create(model=MODEL, messages=USER, extra_headers=SESSION)
    assert await told(setup) == [(common_pb2.SESSION_STATE_USER, None)]
    call = json.dumps({"name": "get_weather", "arguments": {"city": "Oslo"}})
    setup.says(f"<tool_call>\n{call}\n</tool_call>")
    answer = await setup.client.chat.completions.create(
        model=MODEL, messages=USER, tools=[TOOL], extra_headers=SESSION, stream=True
    )
    finish = [chunk.choices[0].finish_reason async for chunk in answer if chunk.choices][-1]
    assert finish == "tool_calls"
    assert await told(setup) == [(common_pb2.SESSION_STATE_USER, None), (common_pb2.SESSION_STATE_TOOL, None)]


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ({"ended": True}, (common_pb2.SESSION_STATE_ENDED, None)),
        ({"returns_in": "2m"}, (common_pb2.SESSION_STATE_USER, 120.0)),
        ({"returns_in": 0}, (common_pb2.SESSION_STATE_USER, 0.0)),
    ],
)
async def test_the_client_knows_better(setup, said, hint) -> None:
    body = {"penstock": {"session": said}}
    await setup.client.chat.completions.create(model=MODEL, messages=USER, extra_headers=SESSION, extra_body=body)
    await setup.client.completions.create(model=MODEL, prompt="Once", extra_headers=SESSION, extra_body=body)
    assert await told(setup) == [hint, hint]


async def test_without_a_request(setup) -> None:
    async with httpx2.AsyncClient(base_url=setup.url) as http:
        for body in ({"ended": True}, {"returns_in": "30s"}, {"ended": True, "prompt_cache_key": "other"}):
            headers = {} if "prompt_cache_key" in body else SESSION
            answer = await http.post("/v1/sessions/hint", json=body, headers=headers)
            assert (answer.status_code, answer.json()) == (200, {"object": "session.hint", "accepted": True})
    assert await told(setup) == [
        (common_pb2.SESSION_STATE_ENDED, None),
        (common_pb2.SESSION_STATE_UNSPECIFIED, 30.0),
        (common_pb2.SESSION_STATE_ENDED, None),
    ]
    assert [hint.session for hint in setup.mesh.router.hints] == [digest("talk"), digest("talk"), digest("other")]


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        (b"{}", SESSION, "ended"),
        (b'{"ended": true}', {}, "x-session-affinity"),
        (b'{"ended": 1}', SESSION, "ended"),
        (b'{"over": true}', SESSION, "over"),
        (b'{"returns_in": "25h"}', SESSION, "returns_in"),
        (b"[", SESSION, None),
    ],
)
async def test_a_wrong_hint_is_refused_by_name(setup, body, headers, param) -> None:
    async with httpx2.AsyncClient(base_url=setup.url) as http:
        answer = await http.post("/v1/sessions/hint", content=body, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        answer = await http.post("/v1/sessions/hint", content=b" " * 5000, headers=headers)
        assert answer.status_code == 413
    assert setup.mesh.router.hints == []


async def test_a_router_that_is_away_is_said(setup) -> None:
    setup.mesh.router.away = True
    try:
        async with httpx2.AsyncClient(base_url=setup.url) as http:
            answer = await http.post("/v1/sessions/hint", json={"ended": True}, headers=SESSION)
    finally:
        setup.mesh.router.away = False
    assert answer.status_code == 503
    assert "going away" not in answer.text, "the mesh's own words are not the client's"


async def test_over_grpc(setup) -> None:
    async with grpc.aio.insecure_channel(setup.gateway.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        outlook = gateway_pb2.SessionOutlook(returns_in_s=12.0)
        metadata = [("x-session-affinity", "talk")]
        await stub.HintSession(gateway_pb2.HintSessionRequest(session=outlook), metadata=metadata)
        message = gateway_pb2.ChatMessage(role="user", content="Hi")
        ended = gateway_pb2.SessionOutlook(ended=True)
        request = gateway_pb2.ChatCompletionRequest(model=MODEL, messages=[message], session=ended)
        async for _ in stub.ChatCompletion(request, metadata=metadata):
            pass
        assert await told(setup) == [
            (common_pb2.SESSION_STATE_UNSPECIFIED, 12.0),
            (common_pb2.SESSION_STATE_ENDED, None),
        ]
        for wrong in (
            gateway_pb2.HintSessionRequest(),
            gateway_pb2.HintSessionRequest(session=gateway_pb2.SessionOutlook(ended=True, returns_in_s=1.0)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.HintSession(wrong, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.HintSession(gateway_pb2.HintSessionRequest(session=outlook))
        assert "x-session-affinity" in (caught.value.details() or "")


async def test_a_tenant_can_not_speak_of_anothers_session(opened, tmp_path) -> None:
    """The same key of two tenants is two sessions, and a tenant's digest is no key."""
    keys = key_file(tmp_path / "keys.json", {"key-a": "a", "key-b": "b"})
    async with opened(api_key="key-a", api_keys=keys, server_key="00" * 32) as setup:
        async with httpx2.AsyncClient(base_url=setup.url) as http:
            for key, session in (("key-a", "talk"), ("key-b", "talk"), ("key-b", digest("talk", "a"))):
                headers = {"authorization": f"Bearer {key}", "x-session-affinity": session}
                await http.post("/v1/sessions/hint", json={"ended": True}, headers=headers)
            headers["authorization"] = "Bearer key-c"
            assert (await http.post("/v1/sessions/hint", json={"ended": True}, headers=headers)).status_code == 401
        said = [hint.session for hint in setup.mesh.router.hints]
        assert said[:2] == [digest("talk", "a"), digest("talk", "b")]
        assert len(set(said)) == 3
