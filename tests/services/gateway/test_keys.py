"""API keys: hashed at rest, made and revoked on the command line, followed without a restart."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import httpx2
import pytest

from penstock.gateway.accounts.keys import read_keys
from penstock.gateway.accounts.ring import KeyRing
from penstock.gateway.door.http import routes
from penstock.runtime.config import ConfigError
from penstock.testing.keys import key_file
from penstock.v1 import gateway_pb2, gateway_pb2_grpc

SERVER_KEY = "ab" * 16


def keys(*arguments: str, file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli", "keys", *arguments, "--file", str(file)]
    return subprocess.run(command, capture_output=True, text=True)


def added(tenant: str, *more: str, file: Path) -> str:
    done = keys("add", tenant, *more, file=file)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_key_is_told_once_and_never_written(tmp_path):
    file = tmp_path / "keys.json"
    key = added("acme", "--note", "ci", file=file)
    operator = added("ops", "--operator", file=file)
    assert len(key) > 40 and key != operator
    assert key not in file.read_text() and operator not in file.read_text()
    assert os.stat(file).st_mode & 0o077 == 0
    entries = {entry.tenant: entry for entry in read_keys(file)}
    assert entries["acme"].role == "client" and entries["ops"].role == "operator"
    shown = keys("list", file=file).stdout
    assert entries["acme"].id in shown and "ci" in shown and entries["acme"].sha256 not in shown
    assert keys("revoke", entries["acme"].id, file=file).returncode == 0
    assert [entry.tenant for entry in read_keys(file)] == ["ops"]
    wrong = keys("revoke", "k-none", file=file)
    assert wrong.returncode == 2 and entries["ops"].id in wrong.stderr


def test_a_file_that_another_tool_made_is_refused_and_kept(tmp_path):
    file = tmp_path / "keys.json"
    file.write_text('{"secret": "tenant"}')
    done = keys("add", "acme", file=file)
    assert done.returncode == 2 and "penstock keys add" in done.stderr and "secret" not in done.stderr
    assert file.read_text() == '{"secret": "tenant"}'


def test_a_broken_file_changes_nothing(tmp_path):
    file = key_file(tmp_path / "keys.json", {"one": "a"})
    ring = KeyRing(file)
    assert not ring.reload()
    file.write_text("{")
    assert not ring.reload() and ring.find("one").tenant == "a"
    file.unlink()
    assert not ring.reload() and ring.find("one")
    key_file(file, {"two": "b"})
    assert ring.reload() and ring.find("one") is None and ring.find("two").tenant == "b"
    with pytest.raises(ConfigError, match="api_keys"):
        KeyRing(tmp_path / "none.json")


async def test_keys_come_and_go_without_a_restart(opened, tmp_path):
    file = key_file(tmp_path / "keys.json", {"first": "a"})
    async with opened(api_keys=file, server_key=SERVER_KEY, api_key="first") as setup:
        async with httpx2.AsyncClient(base_url=setup.url) as http:

            async def status(key: str) -> int:
                return (await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code

            assert (await status("first"), await status("second")) == (200, 401)
            key_file(file, {"second": "b"})
            async with asyncio.timeout(10):
                while await status("second") != 200:
                    pass
            assert await status("first") == 401


async def test_the_task_that_follows_the_file_is_started_again(opened, tmp_path):
    file = key_file(tmp_path / "keys.json", {"first": "a"})
    async with opened(api_keys=file, server_key=SERVER_KEY) as setup:
        [task] = [task for task in asyncio.all_tasks() if task.get_name() == "keys"]
        while task._fut_waiter is None:  # it has not begun to wait
            await asyncio.sleep(0)
        task._fut_waiter.set_exception(RuntimeError("a defect"))
        key_file(file, {"second": "b"})
        async with httpx2.AsyncClient(base_url=setup.url, headers={"x-api-key": "second"}) as http:
            async with asyncio.timeout(15):
                while (await http.get("/v1/models")).status_code != 200:
                    pass
        failed = setup.gateway.metrics.registry.get_sample_value("penstock_task_failures_total", {"task": "keys"})
        assert failed == 1


async def test_the_figures_of_all_tenants_are_for_operators(opened, tmp_path):
    file = key_file(tmp_path / "keys.json", {"right": "a"}, operators=["ops"])
    async with opened(api_keys=file, server_key=SERVER_KEY) as setup:
        async with httpx2.AsyncClient(base_url=setup.url) as http:
            asked = [await http.get("/metrics", headers={"x-api-key": key}) for key in ("", "right", "ops")]
    assert [answer.status_code for answer in asked] == [401, 403, 200]
    assert "vllm:" in asked[2].text


async def test_connections_without_a_key_hold_no_place(opened, tmp_path):
    """Six connections with as many calls as each may have open, none of which sends a request: more than all places."""
    file = key_file(tmp_path / "keys.json", {"right": "a"})

    async def never():
        await asyncio.Event().wait()
        yield b""

    async with opened(api_keys=file, server_key=SERVER_KEY) as setup, AsyncExitStack() as stack:
        address = setup.gateway.grpc_address
        options = (("grpc.use_local_subchannel_pool", 1),)
        flood = []
        for _ in range(6):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options))
            call = channel.stream_stream("/penstock.v1.Gateway/ChatCompletion")
            flood += [call(never()) for _ in range(64)]
        async with asyncio.timeout(10):
            assert {await call.code() for call in flood} == {grpc.StatusCode.UNAUTHENTICATED}
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        models = gateway_pb2_grpc.GatewayStub(channel).ListModels(
            gateway_pb2.ListModelsRequest(), metadata=(("x-api-key", "right"),), timeout=5
        )
        assert (await models).models


async def test_both_headers_carry_a_key(opened, tmp_path):
    file = key_file(tmp_path / "keys.json", {"right": "a"})
    async with opened(api_keys=file, server_key=SERVER_KEY) as setup:
        for headers in ({"authorization": "Bearer right"}, {"authorization": "bearer  right"}, {"x-api-key": "right"}):
            async with httpx2.AsyncClient(base_url=setup.url, headers=headers) as http:
                assert (await http.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic right"},
        {"authorization": "right"},
        {"x-api-key": "wrong"},
        {"authorization": "Bearer wrong", "x-api-key": "right"},
    ],
)
async def test_without_a_good_key_there_is_a_401_that_says_how(opened, tmp_path, headers):
    file = key_file(tmp_path / "keys.json", {"right": "a"})
    async with opened(api_keys=file, server_key=SERVER_KEY) as setup:
        async with httpx2.AsyncClient(base_url=setup.url, headers=headers) as http:
            answer = await http.get("/v1/models")
            assert answer.status_code == 401
            assert "x-api-key" in answer.json()["error"]["message"]


async def test_an_operators_key_generates_nothing(opened, tmp_path):
    file = key_file(tmp_path / "keys.json", {"ops": "ops"}, role="operator")
    async with opened(api_keys=file, server_key=SERVER_KEY) as setup:
        async with httpx2.AsyncClient(base_url=setup.url, headers={"authorization": "Bearer ops"}) as http:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 403 and answer.json()["error"]["type"] == "permission_error"
            assert (await http.get("/v1/models")).status_code == 200


OPEN = {"/health", "/healthz", "/readyz", "/openapi.json"}
"""They say nothing of anybody's requests."""


async def test_every_other_route_and_method_asks_for_a_key(opened, tmp_path):
    file = key_file(tmp_path / "keys.json", {"right": "a"})
    async with opened(api_keys=file, server_key=SERVER_KEY) as setup:
        async with httpx2.AsyncClient(base_url=setup.url) as http:
            for route in routes(setup.gateway.reception):
                path = route.path.replace("{id}", "x").replace("{name:path}", "tiny")
                for method in sorted(route.methods - {"HEAD"}):
                    answer = await http.request(method, path, json={} if method == "POST" else None)
                    assert (answer.status_code != 401) == (path in OPEN), (method, path, answer.text)
        methods = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].methods
        async with grpc.aio.insecure_channel(setup.gateway.grpc_address) as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            for method in methods:
                call = getattr(stub, method.name)(getattr(gateway_pb2, method.input_type.name)())
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await (call.read() if method.server_streaming else call)
                assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED, method.name


ODD = [
    b"' OR '1'='1'; DROP TABLE ledger; --",
    b'"; {{7*7}} ${jndi:ldap://127.0.0.1/x} %s%n%x',
    b"../../../../etc/passwd\x7f",
    b"\xff\xfe\xc3\x28 \xe2\x80\xae",
    b"a" * 4000,
]
HEADERS = [
    "authorization", "x-api-key", "x-request-id", "x-session-affinity", "traceparent", "tracestate", "content-type",
    "origin", "accept", "user-agent", "content-encoding", "anthropic-version", "openai-organization",
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
async def test_odd_headers_break_nothing_and_no_key_is_repeated(opened, tmp_path, odd):
    file = key_file(tmp_path / "keys.json", {"right": "a"})
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}'
    async with opened(api_keys=file, server_key=SERVER_KEY, ledger=str(tmp_path / "ledger")) as setup:
        async with httpx2.AsyncClient(base_url=setup.url) as http:
            for name in HEADERS:
                headers = {b"x-api-key": b"right", b"content-type": b"application/json"}
                headers |= {name.encode(): odd if name != "authorization" else b"Bearer " + odd}
                answer = await http.post("/v1/chat/completions", content=body, headers=headers)
                assert answer.status_code < 500, (name, answer.text)
                assert odd[:20] not in answer.content or name not in ("authorization", "x-api-key")
                assert not re.search(r"Traceback|File \"|0x[0-9a-f]{6}|/penstock/", answer.text)
            answer = await http.post("/v1/chat/completions", content=body, headers={"x-api-key": "right"})
            assert answer.status_code == 200
