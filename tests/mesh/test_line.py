"""The router's line, as clients of a real mesh see it: one worker that runs two requests at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from penstock.kv.identity import block_keys, root_key
from penstock.testing.keys import key_file
from penstock.testing.mesh import Mesh, MeshSetup

from .support import prompt, until

TERMS = """
[limits.heavy]
weight = 3.0
"""


@dataclass
class Crowd:
    """Clients of several tenants."""

    mesh: Mesh
    http: httpx2.AsyncClient
    done: list[str] = field(default_factory=list)
    """Names of requests, in the order in which their answers were there."""

    async def ask(self, tenant: str, name: str, tokens: int = 24, **fields: Any) -> httpx2.Response:
        body = {"model": "tiny", "prompt": prompt(name, 40), "max_tokens": tokens, "ignore_eos": True} | fields
        headers = {"authorization": f"Bearer key-{tenant}"}
        answer = await self.http.post(f"{self.mesh.url}/v1/completions", json=body, headers=headers)
        if answer.status_code == 200:
            self.done.append(name)
        return answer

    @property
    def held(self) -> int:
        return len(self.mesh.router.line)


@pytest.fixture(scope="module")
async def crowd(tiny, meshes, http, tmp_path_factory) -> AsyncIterator[Callable[[], Crowd]]:
    folder = tmp_path_factory.mktemp("line")
    (folder / "terms.toml").write_text(TERMS)
    file = key_file(folder / "keys.json", {f"key-{name}": name for name in ("flood", "quiet", "heavy")})
    gateway = {"api_keys": file, "server_key": "5e" * 32, "terms": folder / "terms.toml"}
    engine = {"max_running": 2}
    async with meshes(MeshSetup(model=tiny, aggregated=True, kvstore=False, engine=engine, gateway=gateway)) as mesh:
        yield lambda: Crowd(mesh, http)


async def test_ten_to_one_and_the_one_does_not_wait_for_the_ten(crowd: Callable[[], Crowd]) -> None:
    clients = crowd()
    async with asyncio.TaskGroup() as tasks:
        for number in range(30):
            tasks.create_task(clients.ask("flood", f"flood-{number}"))
        await until(lambda: clients.held > 20, "the flood waits")
        for number in range(3):
            before = len(clients.done)
            assert (await clients.ask("quiet", f"quiet-{number}")).status_code == 200
            assert len(clients.done) - before <= 6, "those at the worker, one of the flood, and itself"
    assert len(clients.done) == 33, "nobody was refused"


async def test_a_weight_is_a_larger_share(crowd: Callable[[], Crowd]) -> None:
    clients = crowd()
    async with asyncio.TaskGroup() as tasks:
        for number in range(16):
            tasks.create_task(clients.ask("flood", f"flood-too-{number}"))
            tasks.create_task(clients.ask("heavy", f"heavy-{number}"))
        await until(lambda: clients.held > 20, "both wait")
    first = [name.partition("-")[0] for name in clients.done[:18]]
    assert first.count("heavy") > 1.5 * first.count("flood")


async def test_a_client_that_leaves_is_gone_from_the_line(crowd: Callable[[], Crowd]) -> None:
    clients = crowd()
    asked = [asyncio.create_task(clients.ask("flood", f"long-{number}", 400)) for number in range(12)]
    await until(lambda: clients.held > 7, "most wait")
    for task in asked:
        task.cancel()
    await asyncio.wait(asked)
    await until(lambda: clients.held == 0, "nobody waits")
    await until(lambda: clients.mesh.router.planner.ledger.empty, "nobody is charged")
    assert (await clients.ask("quiet", "after")).status_code == 200


async def test_a_priority_is_earlier_among_those_of_its_account(crowd: Callable[[], Crowd]) -> None:
    clients = crowd()
    async with asyncio.TaskGroup() as tasks:
        for number in range(10):
            tasks.create_task(clients.ask("quiet", f"plain-{number}"))
        await until(lambda: clients.held > 5, "most wait")
        for name, fields in (
            ("late", {"priority": 500}),
            ("soon", {"priority": -500}),
            ("sooner", {"penstock": {"priority": -600}}),
        ):
            tasks.create_task(clients.ask("quiet", name, **fields))
        await until(lambda: clients.held > 8, "they wait too")
    assert clients.done[-1] == "late"
    assert clients.done.index("sooner") < 7
    assert clients.done.index("soon") < 8


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"priority": 1001}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": 1, "penstock": {"priority": 2}}, "priority"),
        ({"penstock": {"priority": -1001}}, "penstock.priority"),
        ({"penstock": {"slo": {"ttft": 0}}}, "penstock.slo.ttft"),
        ({"penstock": {"slo": {"itl": "soon"}}}, "penstock.slo.itl"),
        ({"penstock": {"slo": {"e2e": 3}}}, "penstock.slo.e2e"),
    ],
)
async def test_a_wish_that_can_not_be_is_named(crowd: Callable[[], Crowd], fields: dict[str, Any], param: str) -> None:
    answer = await crowd().ask("quiet", "wrong", **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_a_target_is_met_or_refused_before_any_work(crowd: Callable[[], Crowd]) -> None:
    clients = crowd()
    assert (await clients.ask("quiet", "easy", penstock={"slo": {"ttft": "30s", "itl": 10}})).status_code == 200
    computed = clients.mesh.workers[0].engine.stats().generated_tokens
    answer = await clients.ask("quiet", "never", penstock={"slo": {"itl": 0.0001}})
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("penstock.slo.itl", "slo_unmet")
    assert "0.0001 s" in error["message"]
    assert clients.mesh.workers[0].engine.stats().generated_tokens == computed
    async with asyncio.TaskGroup() as tasks:
        for number in range(20):
            tasks.create_task(clients.ask("quiet", f"before-{number}", 60))
        await until(lambda: clients.held > 15, "most wait")
        answer = await clients.ask("quiet", "behind them", penstock={"slo": {"ttft": 0.05}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (503, "penstock.slo.ttft")


async def test_a_client_is_told_why(crowd: Callable[[], Crowd]) -> None:
    clients = crowd()
    url, body = f"{clients.mesh.url}/v1/completions", {"model": "tiny", "prompt": prompt("why", 80), "max_tokens": 4}
    headers = {"authorization": "Bearer key-quiet", "x-penstock-explain": "plan", "x-session-affinity": "talk"}
    assert "x-penstock-plan" not in (await clients.ask("quiet", "not asked")).headers
    answer = await clients.http.post(url, json=body, headers=headers)
    spec, index = clients.mesh.workers[0].engine.spec, clients.mesh.router.planner.index
    root = root_key(spec, clients.mesh.gateway.reception.auth.namespace("quiet"))
    keys = block_keys(root, body["prompt"], spec.block_size)
    await until(lambda: 4 in index.match(keys[:4]).values(), "the router knows of the pages")
    [plan] = json.loads(answer.headers["x-penstock-plan"])
    assert plan["decode"] == next(iter(clients.mesh.router.planner.registry)).member.id
    assert plan["uncached_tokens"] == 80
    assert plan["held_s"] == 0
    parts = sum(plan[f"{part}_s"] for part in ("queue", "compute", "fetch", "pull", "penalty"))
    assert plan["first_token_s"] == pytest.approx(parts, abs=1e-5)
    assert plan["answer_s"] == pytest.approx(parts + plan["handoff_s"] + plan["room_s"] + plan["decode_s"], abs=1e-5)
    async with clients.http.stream("POST", url, json=body | {"stream": True}, headers=headers) as stream:
        [plan] = json.loads(stream.headers["x-penstock-plan"])
        await stream.aread()
    assert plan["home"] is True
    assert plan["resident_tokens"] >= 64
    answer = await clients.http.post(url, json=body, headers=headers | {"x-penstock-explain": "all"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-penstock-explain")
