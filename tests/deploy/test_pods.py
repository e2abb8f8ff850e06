"""The pods of the chart make a mesh: their command lines really run, each pod at an address of the loopback network."""

from __future__ import annotations

import asyncio
import base64
import os
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.deploy.manifests import Manifest, Pod, flags, of_kind, pods, render, service_of

import penstock.models

_START_S = 90


@dataclass(frozen=True)
class Running:
    """A mesh of pods."""

    pods: dict[str, Pod]
    addresses: dict[str, str]
    """Of pods, by name."""
    key: str
    processes: list[asyncio.subprocess.Process]

    @property
    def url(self) -> str:
        return f"http://{self.addresses['penstock-gateway-0']}:8080"


def started_pods(manifests: list[Manifest]) -> dict[str, Pod]:
    """All pods, by name; of routers each, as the others have their names."""
    found = {}
    for pod in pods(manifests).values():
        number = pod.workload["spec"]["replicas"] if "router" in pod.name else 1
        for each in range(number):
            name = f"{pod.name.removesuffix('-0')}-{each}"
            found[name] = Pod(name, pod.workload, pod.spec, pod.labels)
    return found


@asynccontextmanager
async def running(manifests: list[Manifest], keys: Path) -> AsyncIterator[Running]:
    net = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
    there = started_pods(manifests)
    addresses = {name: f"{net}.{number}" for number, name in enumerate(there, 1)}
    [secret] = of_kind(manifests, "Secret").values()
    data = {name: base64.b64decode(value) for name, value in secret["data"].items()}
    for name, value in data.items():
        (keys / name).write_bytes(value)
    mesh = Running(there, addresses, data["client.key"].decode(), [])
    try:
        for name, pod in there.items():
            for container in pod.containers:
                mesh.processes.append(await start(container, name, addresses, keys))
        yield mesh
    finally:
        for process in mesh.processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def start(container: Manifest, pod: str, addresses: dict[str, str], keys: Path) -> asyncio.subprocess.Process:
    """What the container would run. Names of routers stand for their addresses, as DNS would have it."""
    given = {"$(POD_IP)": addresses[pod], "$(POD_NAME)": pod, "/keys/": f"{keys}/"}
    given |= {f"{name}.penstock-router:": f"{address}:" for name, address in addresses.items()}
    given["/models/penstock-mini"] = str(penstock.models.embedded("penstock-mini"))
    arguments = []
    for argument in container["args"]:
        for written, meant in given.items():
            argument = argument.replace(written, meant)
        arguments.append(argument)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *container["command"][1:], *arguments, "--log-level=warning"),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


async def ready(mesh: Running) -> None:
    """Returns when the gateway takes requests."""
    async with httpx2.AsyncClient() as client, asyncio.timeout(_START_S):
        while True:
            assert all(process.returncode is None for process in mesh.processes)
            try:
                if (await client.get(f"{mesh.url}/readyz")).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(0.1)


async def test_the_pods_of_the_chart_are_a_mesh(tmp_path: Path) -> None:
    """A client is served with the key of the release; the next turn is not computed anew; SIGTERM ends all in order."""
    async with running(render(), tmp_path) as mesh:
        await ready(mesh)
        answers = [await ask(mesh, {"Authorization": f"Bearer {mesh.key}"}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached[0] == 0 and cached[1] > 0
        assert (await ask(mesh, {})).status_code == 401
        for name, pod in mesh.pods.items():
            for container in pod.containers:
                if service_of(container) != "gateway":
                    await probe(container, mesh.addresses[name])
        await metrics(mesh)
        for process in mesh.processes:
            process.terminate()
        async with asyncio.timeout(30):
            assert {await process.wait() for process in mesh.processes} == {0}


async def ask(mesh: Running, headers: dict[str, str]) -> httpx2.Response:
    """One request of a client."""
    said = "Which of the pods of this mesh have answered, and from which tier did the blocks of the prompt come? " * 3
    body = {"model": "penstock-mini", "messages": [{"role": "user", "content": said}], "max_tokens": 4}
    async with httpx2.AsyncClient(timeout=60) as client:
        return await client.post(f"{mesh.url}/v1/chat/completions", json=body, headers=headers)


async def probe(container: Manifest, address: str) -> None:
    """Asks as the kubelet does."""
    for kind in ("startup", "liveness", "readiness"):
        asked = container[f"{kind}Probe"]["grpc"]
        async with grpc.aio.insecure_channel(f"{address}:{asked['port']}") as channel:
            request = health_pb2.HealthCheckRequest(service=asked.get("service", ""))
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def metrics(mesh: Running) -> None:
    """What scales asks for is there."""
    texts = {}
    async with httpx2.AsyncClient() as client:
        for name, pod in mesh.pods.items():
            for container in pod.containers:
                port = flags(container)["metrics-address"].rpartition(":")[2]
                got = await client.get(f"http://{mesh.addresses[name]}:{port}/metrics")
                texts[service_of(container)] = got.text
    assert "penstock_requests_live " in texts["gateway"]
    for worker in ("prefill", "decode"):
        assert "\npenstock_queue_seconds " in texts[worker]
        assert "\nvllm:kv_cache_usage_perc " in texts[worker]
    assert len(texts) == 5


@pytest.fixture(autouse=True)
def _several_loopback_addresses() -> None:
    if sys.platform != "linux":
        pytest.skip("needs 127.0.0.0/8, as Linux has it")
