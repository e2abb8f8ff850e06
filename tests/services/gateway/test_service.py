"""The process: who may call, what it says of itself, how it starts, what it does without the mesh."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import httpx2
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import trace
from uvicorn.importer import ImportFromStringError

from penstock.gateway.accounts.auth import load_auth, session_digest
from penstock.gateway.config import GatewayConfig
from penstock.gateway.service import open_gateway
from penstock.kv.bounds import keys_of
from penstock.kv.identity import block_keys, namespace, root_key
from penstock.rpc.server import RpcServer
from penstock.runtime.config import ConfigError
from penstock.testing.keys import key_file

HELLO = [{"role": "user", "content": "hi"}]


async def ask(client, **options):
    return await client.chat.completions.create(model="tiny", messages=HELLO, **options)


async def test_tenants_are_kept_apart(opened, tmp_path):
    keys = key_file(tmp_path / "keys.json", {"secret-a": "a", "secret-b": "b", "secret-a2": "a"})
    async with opened(api_keys=keys, server_key="ab" * 16, api_key="secret-a") as setup:
        for key in ("secret-a", "secret-b", "secret-a2"):
            headers = {"x-session-affinity": "same"}
            await ask(setup.client.with_options(api_key=key), extra_headers=headers)
        a, b, a2 = setup.mesh.router.asks
        assert (a.tenant, b.tenant, a2.tenant) == ("a", "b", "a")
        assert a.block_keys == a2.block_keys
        assert not set(keys_of("a", a.block_keys)) & set(keys_of("b", b.block_keys))
        assert a.session == a2.session != b.session
        said = [(request.namespace, request.session) for request in setup.mesh.decodes[0].requests]
        assert said[0] == said[2] == (said[0][0], a.session) and said[0][0] != said[1][0] and said[1][1] == b.session
        requests = setup.mesh.prefills[0].requests
        root = root_key(setup.mesh.spec, namespace(bytes.fromhex("ab" * 16), "a"))
        assert requests[0].cache_root == root != requests[1].cache_root
        assert keys_of("a", a.block_keys) == block_keys(root, list(requests[0].prompt_ids), setup.mesh.spec.block_size)
        for key in ("wrong", "secret-", "secret-aa", "', DROP TABLE", "é"):
            async with httpx2.AsyncClient(base_url=setup.url) as client:
                value = f"Bearer {key}".encode()
                for path in ("/v1/models", "/v1/models/tiny"):
                    assert (await client.get(path, headers={"authorization": value})).status_code == 401
                for path in ("/v1/chat/completions", "/v1/completions"):
                    answer = await client.post(path, content=b"{", headers={"authorization": value})
                    assert answer.status_code == 401
                    assert answer.json()["error"]["type"] == "authentication_error"
        with pytest.raises(openai.AuthenticationError):
            await setup.client.with_options(api_key="x").models.list()


async def test_the_root_is_never_the_clients_choice(setup, opened):
    for field in ("cache_salt", "cache_root", "kv_transfer_params"):
        with pytest.raises(openai.BadRequestError):
            await ask(setup.client, extra_body={field: {"remote_host": "z"}})
    assert not setup.mesh.prefills[0].requests
    async with opened(unknown_fields="warn") as lenient:
        await ask(lenient.client, extra_body={"cache_root": "y"})
        await ask(lenient.client)
        first, second = lenient.mesh.prefills[0].requests
        assert first.cache_root == second.cache_root


@pytest.mark.parametrize(
    ("headers", "body", "same"),
    [
        ({"x-session-affinity": "k"}, {}, True),
        ({"x-claude-code-session-id": "k"}, {}, True),
        ({"session-id": "k"}, {}, True),
        ({"session_id": "k"}, {}, True),
        ({}, {"prompt_cache_key": "k"}, True),
        ({"x-session-affinity": "k", "session-id": "other"}, {"prompt_cache_key": "other"}, True),
        ({"x-session-affinity": ""}, {"prompt_cache_key": "k"}, True),
        ({"session-id": "other"}, {"prompt_cache_key": "k"}, False),
        ({"x-session-id": "k"}, {}, True),
        ({"x-smg-routing-key": "k"}, {}, True),
        ({"x-dynamo-session-id": "k", "x-session-affinity": "other"}, {}, False),
        ({"x-dynamo-session-id": "k"}, {}, True),
    ],
)
async def test_session_keys(setup, headers, body, same):
    await ask(setup.client, extra_headers=headers, extra_body=body)
    expected = session_digest("default", {"x-session-affinity": "k"}, None)
    found = setup.mesh.router.asks[0].session
    assert (found == expected) is same
    assert found and setup.mesh.prefills[0].requests[0].session == found


async def test_no_session_key_no_session(setup):
    await ask(setup.client)
    assert setup.mesh.router.asks[0].session == ""


def test_session_keys_are_bounded():
    digest = session_digest("t", {"session-id": "x" * 10**6}, None)
    assert digest == session_digest("t", {"session-id": "x" * 600}, None)
    assert len(digest) == 32


async def test_models(setup):
    models = await setup.client.models.list()
    assert [(model.id, model.object, model.model_dump()["max_model_len"]) for model in models.data] == [
        ("tiny", "model", 2048)
    ]
    assert (await setup.client.models.retrieve("tiny")).id == "tiny"


async def test_health_and_metrics(setup):
    await ask(setup.client)
    with pytest.raises(openai.BadRequestError):
        await ask(setup.client, temperature=-1)
    await setup.gateway.reception.admission.idle()
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        assert (await client.get("/healthz")).text == "ok\n"
        assert (await client.get("/readyz")).status_code == 200
        text = (await client.get("/metrics")).text
    for line in (
        'penstock_requests_total{outcome="ok"}',
        'penstock_requests_total{outcome="refused"}',
        'vllm:prompt_tokens_total{model_name="tiny"}',
    ):
        assert line in text
    metrics = setup.gateway.metrics.registry
    by_source = {
        sample.labels["source"]: sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.name == "vllm:prompt_tokens_by_source_total"
    }
    assert sum(by_source.values()) == metrics.get_sample_value("vllm:prompt_tokens_total", {"model_name": "tiny"}) > 0
    assert metrics.get_sample_value("penstock_requests_live") == 0


async def test_not_ready_while_no_worker_is(setup):
    mesh = setup.gateway.view
    try:
        setup.mesh.set_view(ready=False)
        await mesh.until(False)
        async with httpx2.AsyncClient(base_url=setup.url) as client:
            assert (await client.get("/readyz")).status_code == 503
            assert (await client.get("/healthz")).status_code == 200
    finally:
        setup.mesh.set_view(ready=True)
    await setup.gateway.ready()


async def test_without_a_router(model_dir):
    config = GatewayConfig(router="127.0.0.1:1", model_dir=model_dir, http_address="127.0.0.1:0", failover_s=0.2)
    async with open_gateway(config) as gateway, httpx2.AsyncClient(base_url=f"http://{gateway.address}") as client:
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        answer = await client.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO})
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1


async def test_another_tokenizer_is_not_served(opened, model_dir, tmp_path):
    async with opened() as setup:
        other = tmp_path / "tiny"
        other.mkdir()
        text = (model_dir / "tokenizer.json").read_text()
        (other / "tokenizer.json").write_text(text + "\n")
        config = GatewayConfig(router=setup.mesh.address, model_dir=other, http_address="127.0.0.1:0", failover_s=0.2)
        async with open_gateway(config) as gateway:
            async with gateway.view.changed:
                await gateway.view.changed.wait_for(lambda: gateway.view._connected)
            assert not gateway.view.ready


async def test_a_server_that_fails_before_it_listens_ends_the_start(opened, monkeypatch):
    """uvicorn fails while it loads its protocol; the start neither succeeds nor waits for ever."""
    monkeypatch.setattr("penstock.gateway.door.server.BoundedProtocol", "penstock.nowhere:Protocol")
    async with asyncio.timeout(10):
        with pytest.raises(ImportFromStringError, match=r"penstock\.nowhere"):
            async with opened():
                pass


async def test_an_address_that_is_taken_is_named(model_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = GatewayConfig(router="127.0.0.1:1", model_dir=model_dir, http_address=address)
        with pytest.raises(ConfigError, match=f"http_address = '{address}': cannot listen there: .*in use"):
            async with open_gateway(config):
                pass


async def test_two_gateways_in_one_process(opened):
    async with opened() as one, opened() as two:
        one.says("one")
        two.says("two")
        assert [(await ask(setup.client)).choices[0].message.content for setup in (one, two)] == ["one", "two"]


async def test_request_ids(setup):
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        for given, taken in (("my-id.1", True), ("no spaces", False), ("x" * 200, False), ("", False)):
            body = {"model": "tiny", "messages": HELLO}
            answer = await client.post("/v1/chat/completions", json=body, headers={"x-request-id": given})
            found = answer.headers["x-request-id"]
            assert (found == given) is taken and found
            assert setup.mesh.decodes[0].requests[-1].request_id.startswith(found)
        failed = await client.post("/v1/chat/completions", content=b"{", headers={"x-request-id": "mine"})
        assert failed.headers["x-request-id"] == "mine"


async def test_the_clients_trace_goes_on(setup):
    seen = []
    say = setup.script.say

    def spying(request):
        seen.append(trace.get_current_span().get_span_context().trace_id)
        return say(request)

    setup.script.say = spying
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        body = {"model": "tiny", "messages": HELLO}
        for given in (parent, "garbage", "00-" + "0" * 32 + "-b7ad6b7169203331-01"):
            answer = await client.post("/v1/chat/completions", json=body, headers={"traceparent": given})
            assert answer.status_code == 200
    assert set(seen[:2]) == {0x0AF7651916CD43DD8448EB211C80319C}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"router": "nowhere"}, "router"),
        ({"http_address": "8080"}, "http_address"),
        ({"max_live_requests": 0}, "max_live_requests"),
        ({"request_timeout_s": 0}, "request_timeout_s"),
        ({"failover_s": -1}, "failover_s"),
        ({"log_level": "loud"}, "log_level"),
        ({"server_key": "ab" * 16, "server_key_file": "/x"}, "server_key_file"),
        ({"http_address": "0.0.0.0:0"}, "http_address"),
        ({"http_address": "[::]:0"}, "http_address"),
        ({"http_address": "gateway.example:80"}, "http_address"),
        ({"grpc_address": "192.168.0.7:0"}, "grpc_address"),
        ({"batch_store": "redis+cluster://127.0.0.1:1"}, "batch_store"),
        ({"batch_kept_s": 0}, "batch_kept_s"),
    ],
)
def test_settings_are_checked(model_dir, settings, named):
    with pytest.raises(ConfigError, match=named):
        GatewayConfig(**{"router": "127.0.0.1:1", "model_dir": model_dir, **settings})


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.3.2.1", "[::1]"])
def test_without_keys_only_this_host_is_served(model_dir, host):
    doors = {"http_address": f"{host}:0", "grpc_address": f"{host}:0"}
    GatewayConfig(router="127.0.0.1:1", model_dir=model_dir, **doors)
    GatewayConfig(router="127.0.0.1:1", model_dir=model_dir, http_address="0.0.0.0:0", api_keys="keys.json")


@pytest.mark.parametrize(
    ("files", "settings", "named"),
    [
        ({"k": "[]"}, {"api_keys": "k", "server_key": "ab" * 16}, "api_keys"),
        ({"k": "{"}, {"api_keys": "k", "server_key": "ab" * 16}, "api_keys"),
        ({"k": "{}"}, {"api_keys": "k", "server_key": "ab" * 16}, "api_keys"),
        ({"k": '{"cafe": "tenant"}'}, {"api_keys": "k", "server_key": "ab" * 16}, "api_keys"),
        ({"k": '{"keys": [{"id": "k", "sha256": "cafe", "tenant": "t"}]}'}, {"api_keys": "k"}, "api_keys"),
        ({}, {"api_keys": "k", "server_key": "ab" * 16}, "api_keys"),
        ({"k": '{"keys": []}'}, {"api_keys": "k"}, "server_key"),
        ({}, {"server_key": "zz"}, "server_key"),
        ({}, {"server_key": "ab"}, "server_key"),
        ({"s": "cafe"}, {"server_key_file": "s"}, "server_key_file"),
        ({}, {"server_key_file": "s"}, "server_key_file"),
    ],
)
def test_key_files_are_checked(model_dir, tmp_path, files, settings, named):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    paths = {name: tmp_path / value if name != "server_key" else value for name, value in settings.items()}
    config = GatewayConfig(router="127.0.0.1:1", model_dir=model_dir, **paths)
    with pytest.raises(ConfigError, match=named) as failed:
        load_auth(config)
    assert "cafe" not in str(failed.value)


def test_the_server_key_is_not_shown(model_dir):
    config = GatewayConfig(router="127.0.0.1:1", model_dir=model_dir, server_key="ab" * 16)
    assert "abab" not in repr(config)


@pytest.fixture
def process(setup, model_dir):
    """A gateway in a process of its own; gives its addresses and the seconds of CPU that it took until it was ready.

    Of CPU, not of the clock: on an idle machine they are the same, on a busy one only the former is about us.
    """
    mine, theirs = socket.socketpair()
    command = [sys.executable, "-m", "penstock.gateway", "--router", setup.mesh.address, "--model-dir", str(model_dir)]
    child = subprocess.Popen(
        [*command, "--http-address", "127.0.0.1:0"],
        env={**os.environ, "PENSTOCK_SUPERVISOR_FD": str(theirs.fileno())},
        pass_fds=[theirs.fileno()],
        stderr=subprocess.PIPE,
    )
    theirs.close()
    try:
        ready = json.loads(mine.recv(4096))
        user, system = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        yield child, ready, (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    finally:
        mine.close()
        child.communicate(timeout=10)


def mapped_files(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def test_a_process_is_ready_soon_and_stays_light(setup, process):
    child, ready, seconds = process
    assert seconds < 1.5
    async with openai.AsyncOpenAI(base_url=f"http://{ready['address']}/v1", api_key="none") as client:
        assert (await ask(client)).choices[0].message.content == "The quick brown fox."
    assert "torch" not in mapped_files(child.pid)
    child.terminate()
    child.wait(10)
    assert child.returncode == 0


async def test_no_torch_after_a_full_request(setup, model_dir):
    code = """
import asyncio, sys
from pathlib import Path
from penstock.gateway.config import GatewayConfig
from penstock.testing.keys import key_file
from penstock.gateway.service import open_gateway
import http.client, json

def post(address):
    connection = http.client.HTTPConnection(address)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    return connection.getresponse().status

async def main():
    config = GatewayConfig(router=sys.argv[1], model_dir=Path(sys.argv[2]), http_address="127.0.0.1:0")
    async with open_gateway(config) as gateway:
        await gateway.ready()
        print(await asyncio.to_thread(post, gateway.address), {"torch", "transformers"} & set(sys.modules))

asyncio.run(main())
"""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, setup.mesh.address, str(model_dir), stdout=subprocess.PIPE
    )
    out, _ = await child.communicate()
    assert b"200 set()" in out.splitlines()


async def test_the_end_waits_for_running_requests(opened):
    """A request that runs when the gateway is told to stop is answered in full."""
    begun, closing = asyncio.Event(), asyncio.Event()

    async def read(setup) -> str:
        text = ""
        async with openai.AsyncOpenAI(base_url=f"{setup.url}/v1", api_key="none") as client:
            async for chunk in await ask(client, stream=True):
                text += chunk.choices[0].delta.content or ""
                begun.set()
        return text

    async def release(setup) -> None:
        await closing.wait()
        setup.script.gate.set()

    async with asyncio.TaskGroup() as group:
        async with opened(drain_s=5.0) as setup:
            setup.script.hang = True
            reading = group.create_task(read(setup))
            group.create_task(release(setup))
            await begun.wait()
            closing.set()
        assert await reading == "The quick brown fox."


async def test_grpc_health_goes_on_after_a_failure(opened, monkeypatch):
    set_serving, failures = RpcServer.set_serving, 1

    async def fails_once(server, serving):
        nonlocal failures
        if not serving and failures:
            failures -= 1
            raise RuntimeError("a defect")
        await set_serving(server, serving)

    async with opened() as setup, grpc.aio.insecure_channel(setup.gateway.grpc_address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        while (await call.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        monkeypatch.setattr(RpcServer, "set_serving", fails_once)
        setup.mesh.set_view(ready=False)
        async with asyncio.timeout(5):
            assert (await call.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert b'penstock_task_failures_total{task="health"} 1.0' in setup.gateway.metrics.text()
        call.cancel()


async def test_grpc_health_follows_the_mesh(setup):
    async with grpc.aio.insecure_channel(setup.gateway.grpc_address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
        try:
            setup.mesh.set_view(ready=False)
            assert (await call.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        finally:
            setup.mesh.set_view(ready=True)
        assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
        call.cancel()
    await setup.gateway.ready()
