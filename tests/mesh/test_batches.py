"""Batches through a running mesh, by the official client: the answers are those of live requests, a gateway that dies
costs no line, and nobody who is served live notices more than a worker's short steps."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from penstock.cli.mesh import MeshOptions
from penstock.gateway.config import GatewayConfig
from penstock.gateway.service import open_gateway
from penstock.testing.mesh import MeshSetup
from penstock.testing.mortal import mortal_mesh
from penstock.testing.redis_server import redis_server

MODEL = Path(__file__).parents[2] / "libs/penstock/models/penstock-mini"
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.fixture(scope="module")
async def redis_url(tmp_path_factory):
    async with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(scope="module")
async def mesh(meshes, redis_url):
    setup = MeshSetup(model=MODEL, model_name="mini", gateway={"batch_store": redis_url}, engine={"max_running": 8})
    async with meshes(setup) as mesh:
        yield mesh


@pytest.fixture
async def client(mesh):
    async with clients(mesh.url) as made:
        yield made


@asynccontextmanager
async def clients(url: str):
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        yield client


def texts(count: int, tokens: int = 24, name: str = "line") -> list[dict[str, Any]]:
    """Lines that begin alike and go on in ways of their own."""
    opening = "You are a careful assistant who answers in one short sentence and never guesses. " * 3
    body = {"model": "mini", "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    return [request(f"{name}-{at}", TEXT, **body, prompt=f"{opening} Number {at}:") for at in range(count)]


def request(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


async def begun(client: AsyncOpenAI, lines: Sequence[dict[str, Any]], **fields: Any):
    file = await client.files.create(file=("lines.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": lines[0]["url"], "completion_window": "24h"}
    return await client.batches.create(**asked | fields)


async def over(client: AsyncOpenAI, id: str, until: Any = lambda batch: batch.status in ("completed", "failed")):
    async with asyncio.timeout(120):
        while True:
            batch = await client.batches.retrieve(id)
            if until(batch):
                return batch
            await asyncio.sleep(0.02)


async def answers(client: AsyncOpenAI, batch: Any) -> dict[str, Any]:
    """Bodies by custom id; each is there once."""
    lines = [json.loads(one) for one in (await client.files.content(batch.output_file_id)).text.splitlines()]
    assert all(one["response"]["status_code"] == 200 for one in lines)
    found = {one["custom_id"]: one["response"]["body"] for one in lines}
    assert len(found) == len(lines), "no line is done twice"
    return found


async def test_twenty_lines_have_the_answers_that_live_requests_have(client):
    messages = [{"role": "user", "content": "Say hello."}]
    for url, field, lines in (
        (TEXT, "choices", texts(20)),
        (CHAT, "choices", [request("a", CHAT, model="mini", messages=messages, temperature=0, max_tokens=16)]),
        (RESPONSES, "output_text", [request("a", RESPONSES, model="mini", input="Say hello.", temperature=0)]),
    ):
        batch = await over(client, (await begun(client, lines)).id)
        assert batch.status == "completed" and batch.request_counts.completed == len(lines), batch
        found = await answers(client, batch)
        for one in lines:
            live = (await client.post(url.removeprefix("/v1"), body=one["body"], cast_to=object)).copy()
            if field == "output_text":
                assert _text(found[one["custom_id"]]) == _text(live)
            else:
                assert found[one["custom_id"]][field] == live[field]


def _text(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content") or ())


async def test_live_requests_pass_a_batch_that_fills_every_place(client, mesh):
    """And what they get is what they get without it."""
    live = {"model": "mini", "prompt": "Call me Ishmael.", "temperature": 0, "max_tokens": 60}
    expected = (await client.completions.create(**live)).choices[0].text
    batch = await begun(client, texts(40, tokens=200, name="long"))
    await over(client, batch.id, lambda found: found.status == "in_progress")
    worker = mesh.decode[0].worker
    async with asyncio.timeout(60):
        while worker.stats().yielding < 8:
            await asyncio.sleep(0.005)
    for _ in range(5):
        assert (await client.completions.create(**live)).choices[0].text == expected
        assert worker.stats().running == worker.stats().waiting == 0, "a batch is no load for others"
    async with asyncio.timeout(30):
        while not mesh.router.planner.ledger.empty:
            await asyncio.sleep(0.005)
    assert not len(mesh.router.line), "only their own charges were there"
    done = await over(client, batch.id)
    assert done.status == "completed" and len(await answers(client, done)) == 40
    async with asyncio.timeout(30):
        while mesh.router.yielding.live or worker.stats().yielding:
            await asyncio.sleep(0.005)


async def test_a_batch_that_is_cancelled_leaves_nothing_at_the_workers(client, mesh):
    batch = await begun(client, texts(30, tokens=400, name="cancelled"))
    worker = mesh.decode[0].worker
    async with asyncio.timeout(60):
        while not worker.stats().yielding:
            await asyncio.sleep(0.005)
    await client.batches.cancel(batch.id)
    found = await over(client, batch.id, lambda found: found.status == "cancelled")
    assert found.request_counts.completed < 30
    async with asyncio.timeout(30):
        while worker.stats().yielding or mesh.router.yielding.live or len(mesh.router.yielding):
            await asyncio.sleep(0.005)


async def test_lines_are_accounted_like_requests(client, mesh, http):
    async def used() -> int:
        rows = (await http.get(f"{mesh.url}/v1/usage", params={"by": "total"})).json()["data"]
        return sum(row["requests"] for row in rows)

    before = await used()
    batch = await over(client, (await begun(client, texts(6, name="accounted"))).id)
    assert await used() == before + 6
    assert batch.usage.output_tokens == 6 * 24


async def test_two_gateways_share_a_redis(mesh, redis_url):
    """A batch is known to both and run by one; the other has another."""
    settings = {"model_dir": MODEL, "model_name": "mini", "http_address": "127.0.0.1:0", "batch_store": redis_url}
    config = GatewayConfig(router=mesh.router.address, **settings)
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(open_gateway(config))
        await other.ready()
        here = await stack.enter_async_context(clients(mesh.url))
        there = await stack.enter_async_context(clients(f"http://{other.address}"))
        made = [await begun(here, texts(10, name=f"shared{at}")) for at in range(3)]
        for batch in made:
            assert (await there.batches.retrieve(batch.id)).id == batch.id
            done = await over(there, batch.id)
            assert done.status == "completed" and len(await answers(there, done)) == 10


LINES = 480
"""More than are done between two looks at a batch."""


@pytest.mark.mesh
async def test_a_gateway_that_is_killed_costs_no_line_and_does_none_twice(tmp_path):
    """Lines that have a result keep it, and are not asked for again; those that were on their way are."""
    store = tmp_path / "batches"
    options = MeshOptions(
        port=0, aggregated=True, draft="none", kv_host_bytes=64 << 20, batch_store=str(store), log_level="error"
    )
    lines = texts(LINES, tokens=64)
    for line in lines:
        line["body"]["model"] = "penstock-mini"
    async with mortal_mesh(options) as mesh, clients(mesh.url) as client:
        batch = await begun(client, lines)
        await over(client, batch.id, lambda found: found.request_counts.completed >= 20)
        [results] = store.rglob(f"file-{batch.id.removeprefix('batch_')}a.data")
        before = results.read_bytes()
        back = mesh.send("gateway", signal.SIGKILL)
        whole = before[: before.rfind(b"\n") + 1]
        assert 20 <= whole.count(b"\n") < LINES
        await back()
        done = await over(client, batch.id)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", LINES, 0)
        found = await answers(client, done)
        assert {*found} == {line["custom_id"] for line in lines}
        after = (await client.files.content(done.output_file_id)).content
        assert after.startswith(whole), "what was done is as it was"
        assert done.usage.output_tokens == LINES * 64
        async with httpx2.AsyncClient(base_url=mesh.url) as http:
            metrics = (await http.get("/metrics")).text
        [answered] = re.findall(r'^penstock_batch_lines_total{.*outcome="answered".*} (.*)$', metrics, re.MULTILINE)
        assert 0 < float(answered) <= LINES - whole.count(b"\n"), "nothing that had a result was done again"
