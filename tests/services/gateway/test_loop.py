"""No request holds the event loop up: what another client sees of it, on the clock of the wall."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import httpx2
import pytest

CHAT = "/v1/chat/completions"
CONTEXT = 10**5
PACE_S = 0.002


@pytest.fixture
async def watched(setup):
    """A gateway with a long context whose answers come one token every two milliseconds, for as long as one reads."""
    ids = setup.ids("word") * (CONTEXT // 8)
    setup.script.say = lambda request: ids
    setup.script.pace_s = PACE_S
    setup.mesh.set_view(ready=True, context=CONTEXT)
    mesh = setup.gateway.mesh
    async with mesh.changed:
        await mesh.changed.wait_for(lambda: mesh.served().max_model_len == CONTEXT)
    yield setup
    setup.mesh.set_view(ready=True)
    async with mesh.changed:
        await mesh.changed.wait_for(lambda: mesh.served().max_model_len != CONTEXT)


@asynccontextmanager
async def a_stream(setup) -> AsyncIterator[AsyncIterator[bytes]]:
    """Another client's stream, raw."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with httpx2.AsyncClient(base_url=setup.url) as client, client.stream("POST", CHAT, json=body) as answer:
        yield answer.aiter_raw()


async def longest_gap(setup, request: Awaitable[object]) -> float:
    """The longest silence in another client's stream while `request` is served, in seconds."""
    gap = 0.0
    async with a_stream(setup) as pieces:
        await anext(pieces)
        serving = asyncio.ensure_future(request)
        last = time.perf_counter()
        async for _ in pieces:
            now = time.perf_counter()
            gap, last = max(gap, now - last), now
            if serving.done():
                break
        await serving
    return gap


async def post(setup, path: str, body: bytes) -> int:
    async with httpx2.AsyncClient(base_url=setup.url, timeout=60) as client:
        return (await client.post(path, content=body)).status_code


@pytest.mark.parametrize("raw", [False, True])
async def test_tokenizing_stops_nobody_elses_stream(watched, raw):
    """A million tokens, which are then too many. The bound is a share of what they take, however busy the machine."""
    text = "word " * 200_000
    begin = time.perf_counter()
    await asyncio.to_thread(watched.tokenizer.encode_batch, [text])
    takes = time.perf_counter() - begin
    prompt = {"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}
    body = json.dumps({"model": "tiny", **prompt}).encode()
    statuses = []

    async def send() -> None:
        statuses.append(await post(watched, "/v1/completions" if raw else CHAT, body))

    gap = await longest_gap(watched, send())
    assert statuses == [400]
    assert gap < takes / 4
