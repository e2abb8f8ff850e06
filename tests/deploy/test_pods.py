"""The pods of the chart make a mesh: their command lines really run."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.deploy.manifests import Manifest, Pod, flags, of_kind, pods, render, service_of
from tests.deploy.processes import ask, free_net, processes

import penstock.models


def started_pods(manifests: list[Manifest]) -> dict[str, Pod]:
    """One pod of each workload, by name; of routers each, as the others have their names."""
    found = {}
    for pod in pods(manifests).values():
        number = pod.workload["spec"]["replicas"] if "router" in pod.name else 1
        for each in range(number):
            name = f"{pod.name.removesuffix('-0')}-{each}" if number > 1 else pod.name
            found[name] = Pod(name, pod.workload, pod.spec, pod.labels)
    return found


SEVERAL_NODES = ("pools.prefill=null", "pools.decode=null", "pools.large.nodes=2", "pools.large.workers[0].role=both")


@pytest.mark.parametrize("values", [(), SEVERAL_NODES], ids=["as it is", "a model on two nodes"])
async def test_the_pods_of_the_chart_are_a_mesh(tmp_path: Path, values: Sequence[str]) -> None:
    """A client is served with the key of the release; the next turn is not computed anew; probes and metrics are what
    the manifests say; SIGTERM ends all in order."""
    manifests, net = render(*(part for value in values for part in ("--set", value))), free_net()
    there = started_pods(manifests)
    addresses = {name: f"{net}.{number}" for number, name in enumerate(there, 1)}
    key = write_keys(manifests, tmp_path)
    given = {f"{name}.penstock-router:": f"{address}:" for name, address in addresses.items()}
    given |= {f"{name}.penstock-large:": f"{address}:" for name, address in addresses.items()}
    given |= {"/keys/": f"{tmp_path}/", "/models/penstock-mini": str(penstock.models.embedded("penstock-mini"))}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    async with processes() as started:
        for name, pod in there.items():
            own = {"$(POD_IP)": addresses[name], "$(POD_NAME)": name, **given}
            for container in pod.containers:
                await started.start(container["command"][2], container["args"], own, environment)
        url = f"http://{addresses['penstock-gateway-0']}:8080"
        await started.until_ready(url)
        answers = [await ask(url, {"Authorization": f"Bearer {key}"}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached[0] == 0 and cached[1] > 0
        assert (await ask(url, {})).status_code == 401
        for name, pod in there.items():
            for container in pod.containers:
                await probe(container, addresses[name])
        await check_metrics(there, addresses)
        await started.end()


def write_keys(manifests: list[Manifest], directory: Path) -> str:
    """Puts the release's Secret there, as it is mounted. Returns the client's key."""
    [secret] = of_kind(manifests, "Secret").values()
    for name, value in secret["data"].items():
        (directory / name).write_bytes(base64.b64decode(value))
    return (directory / "client.key").read_text()


async def probe(container: Manifest, address: str) -> None:
    """Asks as the kubelet does."""
    for kind in ("startup", "liveness", "readiness"):
        asked = container[f"{kind}Probe"].get("grpc")
        if asked is None:
            continue
        async with grpc.aio.insecure_channel(f"{address}:{asked['port']}") as channel:
            request = health_pb2.HealthCheckRequest(service=asked.get("service", ""))
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def check_metrics(there: Mapping[str, Pod], addresses: Mapping[str, str]) -> None:
    """Every container is scraped at its port, and what scales finds its metrics."""
    texts = {}
    async with httpx2.AsyncClient() as client:
        for name, pod in there.items():
            for container in pod.containers:
                port = flags(container)["metrics-address"].rpartition(":")[2]
                texts[service_of(container)] = (await client.get(f"http://{addresses[name]}:{port}/metrics")).text
    assert "\npenstock_requests_live " in texts["gateway"]
    for worker in {"prefill", "decode"} & set(texts):
        assert "\npenstock_queue_seconds " in texts[worker]
        assert "\nvllm:kv_cache_usage_perc{" in texts[worker]
    assert len(texts) == 5, "gateway, router, store, and two kinds of workers, or a worker and its stage"
    if "stage" in texts:
        assert "\npenstock_stage_workers_total 1.0\n" in texts["stage"]
