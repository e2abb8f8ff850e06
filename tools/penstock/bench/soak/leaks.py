"""What a mesh holds when nobody asks anything of it, by its own figures and the system's: nothing but what it held when
it had just begun."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import httpx2
from prometheus_client.parser import text_string_to_metric_families

from penstock.bench.soak.faults import kind_of
from penstock.bench.soak.mesh import REDIS, SoakMesh
from penstock.bench.soak.system import descriptors, threads
from penstock.rpc.channels import open_channels
from penstock.v1 import router_pb2, router_pb2_grpc

_WORKER = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "penstock_queued_tokens",
    "penstock_shared_pages",
)
_NOTHING: Mapping[str, Sequence[str]] = {
    "gateway": ("penstock_requests_live", "penstock_batch_lines_running", "penstock_batch_lines_waiting"),
    "router": (
        "penstock_held_requests",
        "penstock_held_yielding_requests",
        "penstock_yielding_plans",
        "charged requests",
    ),
    "prefill": _WORKER,
    "decode": _WORKER,
    "kvstore": (
        "penstock_store_leases",
        "penstock_store_reserved",
        "penstock_store_detached",
        "penstock_store_claims",
        "penstock_store_claimed_blocks",
        "penstock_store_claim_waits",
    ),
    "draft": ("penstock_draft_sequences",),
}
"""Figures that are 0 when nobody asks for anything."""
_AS_BEFORE: Mapping[str, Sequence[str]] = {
    "kvstore": ("penstock_store_attachments",),
    "router": ("members",),
}
"""Figures that are what they were."""
_SLACK: Mapping[str, float] = {"descriptors": 6, "threads": 6, "penstock_tasks": 12}
"""Of the process. So many more are no leak: who has met others since has connections to them, of which each side may
have begun one, with the tasks that serve them."""
_DEFECTS = ("penstock_usage_defects_total", "penstock_store_quarantined_total")
_PATIENCE_S = 5.0
_LOOK_S = 0.25

Reading = Mapping[str, Mapping[str, float]]
"""Figures of services, by their names: metrics, summed over their labels, and what the system says of the process."""


async def read(mesh: SoakMesh) -> Reading:
    """What all services hold now. Raises OSError, KeyError, httpx2.HTTPError and grpc.RpcError where one is not
    there."""
    found: dict[str, Mapping[str, float]] = {}
    pids = mesh.pids()
    async with httpx2.AsyncClient(timeout=_PATIENCE_S) as http, open_channels() as channels:
        for name, address in mesh.metrics.items():
            answer = await http.get(f"http://{address}/metrics")
            figures = summed(answer.text) | of_process(pids[name])
            if router := mesh.routers.get(name):
                stub: Any = router_pb2_grpc.RouterStub(channels.to(router, "router"))
                told = await stub.Members(router_pb2.MembersRequest(), timeout=_PATIENCE_S)
                figures |= {"charged requests": told.requests, "members": len(told.members)}
            found[name] = figures
    if mesh.redis:
        found[REDIS] = of_process(pids[REDIS])
    return found


def summed(text: str) -> dict[str, float]:
    """Metrics in the text form, each summed over its labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def of_process(pid: int) -> dict[str, float]:
    """What the system says. Raises OSError."""
    return {"descriptors": descriptors(pid), "threads": threads(pid)}


def held(now: Reading, idle: Reading) -> list[str]:
    """What is there that should not be, of services at rest, one line for each; `idle` is how they were before."""
    found: list[str] = []
    for name, figures in now.items():
        kind, before = kind_of(name), idle[name]
        for what in _NOTHING.get(kind, ()):
            if figures[what]:
                found.append(f"{name}: {what} = {figures[what]:g}")
        for what in _AS_BEFORE.get(kind, ()):
            if figures[what] != before[what]:
                found.append(f"{name}: {what} = {figures[what]:g}, and was {before[what]:g}")
        for what, slack in _SLACK.items():
            if figures.get(what, 0) > before.get(what, 0) + slack:
                found.append(f"{name}: {what} = {figures[what]:g}, and was {before[what]:g}")
        for what in _DEFECTS:
            if figures.get(what):
                found.append(f"{name}: {what} = {figures[what]:g}")
    return found


async def settled(mesh: SoakMesh, idle: Reading | None, seconds: float) -> tuple[Reading, list[str]]:
    """What is still held when nothing more is given back, or so many seconds have passed. Without `idle` only what
    should be 0 counts."""
    clock = asyncio.get_running_loop().time
    end = clock() + seconds
    while True:
        await mesh.until_up()
        try:
            now = await read(mesh)
        except (OSError, KeyError, httpx2.HTTPError, grpc.RpcError) as error:
            if clock() > end:
                raise
            now, found = {}, [f"a service can't be read: {error}"]
        else:
            found = held(now, idle or now)
        if not found or clock() > end:
            return now, found
        await asyncio.sleep(_LOOK_S)
