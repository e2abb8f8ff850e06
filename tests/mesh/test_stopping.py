"""`penstock up` is told to stop while it serves: what can end in time ends, the rest is told, and nobody is cut off."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field

import grpc
import httpx2
import psutil
import pytest

from penstock.v1 import gateway_pb2, gateway_pb2_grpc

DRAIN_S = 6.0
BODY = {"model": "penstock-mini", "prompt": "Call me Ishmael. ", "temperature": 0, "ignore_eos": True, "stream": True}
FEW, ENDLESS = 16, 8000


@dataclass
class Up:
    """A mesh of processes; `said` is what it has written to standard error."""

    process: asyncio.subprocess.Process
    url: str
    grpc: str
    said: list[str] = field(default_factory=list)

    async def listen(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.said.append(line.decode().rstrip())


@pytest.fixture
async def mesh():
    # An answer that repeats itself is guessed by lookup: even the longest would end by itself before the drain does.
    options = ("--aggregated", "--draft", "none", "--lookup-tokens", "0", "--kv-host-bytes", "64MiB")
    options += ("--drain-s", str(DRAIN_S))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli", "up", "--port", "0", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200"},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(90):
            line = (await process.stdout.readline()).decode()
        url = line.removeprefix("ready ").strip()
        found = Up(process, url, "")
        listening = asyncio.create_task(found.listen())
        async with asyncio.timeout(20):
            while not (told := re.search(r"gRPC (\S+);", "\n".join(found.said))):
                await asyncio.sleep(0.01)
        found.grpc = told[1]
        yield found
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    await listening


class Stream:
    """One stream over HTTP; `begun` when its first token has come."""

    def __init__(self, http: httpx2.AsyncClient, most: int) -> None:
        self._http = http
        self._body = BODY | {"max_tokens": most}
        self.begun = asyncio.Event()

    async def events(self) -> list[str]:
        found: list[str] = []
        async with self._http.stream("POST", "/v1/completions", json=self._body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():  # raises when the connection is cut
                if line.startswith("data: "):
                    found.append(line.removeprefix("data: "))
                    self.begun.set()
        return found


async def test_a_mesh_that_serves_is_stopped(mesh: Up) -> None:
    async with (
        httpx2.AsyncClient(base_url=mesh.url, timeout=60) as http,
        grpc.aio.insecure_channel(mesh.grpc) as channel,
        asyncio.TaskGroup() as tasks,
    ):
        stub = gateway_pb2_grpc.GatewayStub(channel)

        def call(most: int) -> grpc.aio.UnaryStreamCall:
            prompt = BODY["prompt"]
            return stub.Completion(
                gateway_pb2.CompletionRequest(
                    model="penstock-mini", prompts=[prompt], max_tokens=most, ignore_eos=True, temperature=0
                )
            )

        async def chunks(running: grpc.aio.UnaryStreamCall, begun: asyncio.Event) -> grpc.StatusCode:
            try:
                async for _ in running:
                    begun.set()
            except grpc.aio.AioRpcError:
                pass
            return await running.code()

        endless = [Stream(http, ENDLESS) for _ in range(2)]
        told = [tasks.create_task(one.events()) for one in endless]
        long_begun, few_begun = asyncio.Event(), asyncio.Event()
        long_call = tasks.create_task(chunks(call(ENDLESS), long_begun))
        await asyncio.gather(long_begun.wait(), *(one.begun.wait() for one in endless))
        few = Stream(http, FEW)
        finishing = tasks.create_task(few.events())
        few_call = tasks.create_task(chunks(call(FEW), few_begun))
        await asyncio.gather(few.begun.wait(), few_begun.wait())

        mesh.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            while (await http.get("/readyz")).status_code == 200:
                await asyncio.sleep(0.01)
        for stream in (False, True):
            late = await http.post("/v1/completions", json=BODY | {"max_tokens": 1, "stream": stream})
            assert (late.status_code, late.json()["error"]["code"]) == (503, "stopping")
        assert await chunks(call(1), asyncio.Event()) is grpc.StatusCode.UNAVAILABLE

        *_, last, done = await finishing
        assert (json.loads(last)["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        assert await few_call is grpc.StatusCode.OK
        for task in told:
            *_, error, done = await task
            assert (json.loads(error)["error"]["code"], done) == ("stopping", "[DONE]")
        assert await long_call is grpc.StatusCode.UNAVAILABLE
    async with asyncio.timeout(30):
        assert await mesh.process.wait() == 0
    assert any("running requests have ended" in line for line in mesh.said), "it says what it waits for"


async def test_an_idle_mesh_stops_within_two_seconds(mesh: Up) -> None:
    """Of a machine that does nothing else: as many times as long where as many want each processor."""
    async with httpx2.AsyncClient(base_url=mesh.url, timeout=60) as http:
        assert (await http.post("/v1/completions", json=BODY | {"max_tokens": 4, "stream": False})).status_code == 200
        busy = max(1.0, os.getloadavg()[0] / (psutil.cpu_count() or 1))
        began = time.perf_counter()
        mesh.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await mesh.process.wait() == 0
        took = time.perf_counter() - began
        print(f"stopped in {took:.2f} s, {busy:.1f} wanted each processor")
        assert took < 2.0 * busy, mesh.said
