"""A real Envoy before two gateways, with our picker in its external processing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from tests.deploy.manifests import program

from penstock.gateway.config import GatewayConfig
from penstock.gateway.service import Gateway, open_gateway
from penstock.picker.config import PickerConfig
from penstock.picker.service import Picker, open_picker
from penstock.router.config import RouterConfig
from penstock.router.service import open_router
from penstock.testing.mesh import MeshSetup

TYPES = "type.googleapis.com/envoy.extensions"
ENDPOINT = "x-gateway-destination-endpoint"


@dataclass(frozen=True)
class Asked:
    """How one listener asks for a place."""

    port: int
    picker: str
    bodies: str = "FULL_DUPLEX_STREAMED"


def listener(asked: Asked) -> dict[str, Any]:
    """Of an Envoy that asks this picker about each request, and does without an answer when there is none."""
    port, full = asked.port, asked.bodies != "NONE"
    processing = {
        "@type": f"{TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": f"picker_{port}"}, "timeout": "10s"},
        "failure_mode_allow": True,
        "message_timeout": "10s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": asked.bodies,
            "request_trailer_mode": "SEND" if full else "SKIP",
            "response_header_mode": "SEND",
        },
        "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
    }
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": f"in_{port}",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "gateways", "timeout": "60s"}}],
                }
            ]
        },
        "http_filters": [
            {"name": "picker", "typed_config": processing},
            {"name": "router", "typed_config": {"@type": f"{TYPES}.filters.http.router.v3.Router"}},
        ],
    }
    filters = [{"name": "http", "typed_config": manager}]
    return {"name": f"in_{port}", "address": at("127.0.0.1", port), "filter_chains": [{"filters": filters}]}


def at(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def cluster(name: str, *addresses: str, **more: Any) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": at(*split(address))}} for address in addresses]
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "5s", "load_assignment": assignment, **more}


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def policy(name: str, kind: str, **more: Any) -> dict[str, Any]:
    typed = {"@type": f"{TYPES}.load_balancing_policies.{name}.v3.{kind}", **more}
    config = {"name": f"envoy.load_balancing_policies.{name}", "typed_config": typed}
    return {"policies": [{"typed_extension_config": config}]}


def config(gateways: list[str], listeners: list[Asked]) -> dict[str, Any]:
    to_picked = policy(
        *("override_host", "OverrideHost"),
        override_host_sources=[{"header": ENDPOINT}],
        fallback_policy=policy("round_robin", "RoundRobin"),
    )
    http2 = {
        f"{TYPES.partition('/')[2]}.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{TYPES}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    asked = [cluster(f"picker_{one.port}", one.picker, typed_extension_protocol_options=http2) for one in listeners]
    return {
        "static_resources": {
            "listeners": list(map(listener, listeners)),
            "clusters": [cluster("gateways", *gateways, load_balancing_policy=to_picked), *asked],
        }
    }


@asynccontextmanager
async def envoy(given: dict[str, Any], directory: Path) -> AsyncIterator[None]:
    path = directory / "envoy.yaml"
    path.write_text(yaml.safe_dump(given))
    arguments = ["-c", str(path), "--use-dynamic-base-id", "--concurrency", "1", "--log-level", "error"]
    process = await asyncio.create_subprocess_exec(program("envoy"), *arguments)
    try:
        for one in given["static_resources"]["listeners"]:
            async with asyncio.timeout(30):
                while not await listens(one["address"]["socket_address"]["port_value"]):
                    assert process.returncode is None
                    await asyncio.sleep(0.05)
        yield
    finally:
        process.kill()
        await process.wait()


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def served(gateway: Gateway) -> float:
    """Requests that this gateway has ended."""
    families = gateway.metrics.registry.collect()
    return sum(one.value for family in families for one in family.samples if one.name == "penstock_requests_total")


@dataclass(frozen=True)
class Front:
    """An Envoy before two gateways."""

    url: str
    light: str
    """Of a listener that sends its picker headers alone."""
    shut: str
    """Of one whose picker knows no gateway."""
    alone: str
    """Of one whose picker is not there; it would send it headers alone."""
    gateways: dict[str, Gateway]
    picker: Picker


@pytest.fixture(scope="module")
async def front(tiny: Path, meshes: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    program("envoy")
    ports = [free_port() for _ in range(4)]
    async with meshes(MeshSetup(model=tiny, aggregated=True, kvstore=False)) as mesh:
        second = GatewayConfig(
            router=mesh.router.address,
            model_dir=tiny,
            model_name="tiny",
            http_address="127.0.0.1:0",  # type: ignore[arg-type]
        )
        async with (
            open_gateway(second) as other,
            open_router(RouterConfig()) as empty,
            open_picker(PickerConfig(router=(mesh.router.address,), address="127.0.0.1:0", look_s=0.02)) as picker,  # type: ignore[arg-type]
            open_picker(PickerConfig(router=(empty.address,), address="127.0.0.1:0")) as without,  # type: ignore[arg-type]
        ):
            gateways = {gateway.address: gateway for gateway in (mesh.gateway, other)}
            nobody = f"127.0.0.1:{free_port()}"
            listeners = [
                Asked(ports[0], picker.address),
                Asked(ports[1], picker.address, "NONE"),
                Asked(ports[2], without.address),
                Asked(ports[3], nobody, "NONE"),
            ]
            async with envoy(config(list(gateways), listeners), tmp_path_factory.mktemp("envoy")):
                front = Front(*(f"http://127.0.0.1:{port}" for port in ports), gateways, picker.picker)
                async with asyncio.timeout(60):
                    while len(picker.picker.seen.gateways) < 2:
                        await asyncio.sleep(0.02)
                yield front


async def ask(http: httpx2.AsyncClient, url: str, session: str = "", **more: Any) -> httpx2.Response:
    body = {"model": "tiny", "prompt": "of pipes and turbines", "max_tokens": 3, **more}
    headers = {"x-session-affinity": session} if session else {}
    return await http.post(f"{url}/v1/completions", json=body, headers=headers)


async def ended(front: Front, requests: float) -> None:
    """Returns when so many requests in all have ended: a gateway counts one after its last byte."""
    async with asyncio.timeout(20):
        while sum(map(served, front.gateways.values())) < requests:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("bodies", [True, False], ids=["full duplex", "headers alone"])
async def test_requests_go_where_the_picker_says(front: Front, http: httpx2.AsyncClient, bodies: bool) -> None:
    """Sessions stay at their gateway, and each gateway has some."""
    homes = {}
    for session in (f"session {number}" for number in range(8)):
        before = {address: served(gateway) for address, gateway in front.gateways.items()}
        for _ in range(2):
            answer = await ask(http, front.url if bodies else front.light, session)
            assert answer.status_code == 200, answer.text
        await ended(front, sum(before.values()) + 2)
        grown = {address: served(gateway) - before[address] for address, gateway in front.gateways.items()}
        assert sorted(grown.values()) == [0, 2]
        homes[session] = max(grown, key=lambda address: grown[address])
    assert set(homes.values()) == set(front.gateways)
    assert not +front.picker.waiting


async def test_streams_and_long_bodies_pass(front: Front, http: httpx2.AsyncClient) -> None:
    answer = await ask(http, front.url, "streams", stream=True, prompt="turbine " * 120)
    assert answer.status_code == 200 and answer.text.rstrip().endswith("data: [DONE]")
    long = await ask(http, front.url, "streams", prompt="a" * 3_000_000)
    assert long.status_code == 400 and "context" in long.text, "all of it has come"
    broken = await http.post(f"{front.url}/v1/completions", content=b"{not json")
    assert broken.status_code == 400
    got = await http.get(f"{front.url}/v1/models")
    assert got.status_code == 200


async def test_where_a_client_wants_to_go_is_overwritten(front: Front, http: httpx2.AsyncClient) -> None:
    answer = await http.get(f"{front.url}/v1/models", headers={ENDPOINT: "127.0.0.1:1"})
    assert answer.status_code == 200


async def test_without_gateways_the_client_hears_why(front: Front, http: httpx2.AsyncClient) -> None:
    answer = await ask(http, front.shut)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "no_endpoint"


async def test_without_a_picker_envoy_chooses(front: Front, http: httpx2.AsyncClient) -> None:
    """Fail open: any gateway serves any request."""
    assert (await ask(http, front.alone)).status_code == 200
