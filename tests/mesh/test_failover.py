"""What dies and is started again costs a pause: real processes under their supervisor, one of each kind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx2
import psutil
import pytest

from .support import up

PROMPT = "Call me Ishmael. " * 20
BODY = {"model": "penstock-mini", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}


@dataclass
class Up:
    """A mesh of processes."""

    supervisor: psutil.Process
    http: httpx2.AsyncClient

    def pid(self, service: str) -> int:
        """Of the process that runs the service now."""
        children = self.supervisor.children(recursive=True)
        [found] = [child for child in children if f"penstock.{service}" in " ".join(child.cmdline()).split()]
        return found.pid

    async def tokens(self, seen: asyncio.Event | None = None, **more: Any) -> list[int]:
        """The ids of a streamed completion; sets `seen` after 20."""
        ids: list[int] = []
        body = BODY | {"stream": True, "return_token_ids": True} | more
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    ids += [id for choice in chunk["choices"] for id in choice["token_ids"]]
                    if seen is not None and len(ids) >= 20:
                        seen.set()
        return ids


@pytest.fixture(scope="module")
async def mesh() -> AsyncIterator[Up]:
    """With one decode worker: nobody takes over but its successor."""
    async with up("--draft", "none") as (process, _, url), httpx2.AsyncClient(base_url=url, timeout=120) as http:
        yield Up(psutil.Process(process.pid), http)
        metrics = (await http.get("/metrics")).text
        assert re.search(r"^penstock_usage_defects_total 0\.0$", metrics, re.MULTILINE)


async def test_streams_outlive_their_only_decode_worker(mesh: Up) -> None:
    """Those that run, and those that come while it is away."""
    prompts = [{"prompt": PROMPT + name, "max_tokens": 1200} for name in "abc"]  # none ends before all have begun
    expected = [await mesh.tokens(**prompt) for prompt in prompts]
    seen = [asyncio.Event() for _ in prompts]
    running = [asyncio.create_task(mesh.tokens(event, **prompt)) for event, prompt in zip(seen, prompts, strict=True)]
    await asyncio.gather(*(event.wait() for event in seen))
    assert not any(task.done() for task in running)
    os.kill(mesh.pid("decode"), signal.SIGKILL)
    running.append(asyncio.create_task(mesh.tokens(**prompts[0])))
    async with asyncio.timeout(90):
        assert await asyncio.gather(*running) == [*expected, expected[0]]


async def test_requests_wait_for_a_router_that_comes_back(mesh: Up) -> None:
    expected = await mesh.tokens()
    seen = asyncio.Event()
    running = asyncio.create_task(mesh.tokens(seen))
    await seen.wait()
    os.kill(mesh.pid("router"), signal.SIGKILL)
    async with asyncio.timeout(90):
        assert await asyncio.gather(running, mesh.tokens(), mesh.tokens()) == [expected] * 3
