"""`penstock scale` beside a mesh that serves: it adds a worker, flips one, and takes one away; no request is lost."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from penstock.cli.scale.config import ScaleConfig
from penstock.cli.scale.service import open_scale
from penstock.engine.config import EngineSettings
from penstock.engine.request import SamplingParams
from penstock.testing.mesh import MeshSetup

from .support import ask, prompt, until

SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = replace(SHORT, max_tokens=100)
PLACES = 4
"""Of each worker."""
QUICK = {"every_s": 0.25, "start_s": 1.0, "down_after_s": 1.5, "flip_after_s": 0.5, "cool_s": 0.5}


@pytest.fixture
async def mesh(tiny, meshes):
    async with meshes(MeshSetup(model=tiny, decode=1, engine={"max_running": PLACES, "draft_tokens": 0})) as mesh:
        yield mesh


def workers(mesh, role: str) -> list[str]:
    """Addresses of those that get work."""
    seats = [seat for seat in mesh.router.planner.registry if seat.member.role is not None and not seat.draining]
    return [seat.member.address for seat in seats if seat.member.role.value == role]


class Traffic:
    """Streams one behind the other until it is told to end; all answers."""

    def __init__(self, http, mesh, streams: int, sampling: SamplingParams) -> None:
        self._http, self._mesh, self._streams, self._sampling = http, mesh, streams, sampling
        self._over = asyncio.Event()
        self.answers = []

    @asynccontextmanager
    async def running(self):
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._streams):
                tasks.create_task(self._stream(number))
            try:
                yield self
            finally:
                self._over.set()

    async def _stream(self, number: int) -> None:
        count = 0
        while not self._over.is_set():
            tokens = prompt(f"scale/{id(self)}/{number}/{count}", 60)
            self.answers.append((tokens, await ask(self._http, self._mesh, tokens, self._sampling)))
            count += 1


async def same(answers, oracle) -> None:
    for tokens, answer in answers[-6:]:
        alone = await oracle(tokens, replace(LONG, max_tokens=len(answer.ids)))
        assert answer.ids == alone.ids


async def test_load_adds_a_worker_and_idleness_takes_it_away_while_requests_run(mesh, tiny, oracle, http):
    """Local processes. Streams are more than one worker has places for."""
    replans = mesh.gateway.metrics.of("tiny").replans._value
    before, [own] = replans.get(), workers(mesh, "decode")
    config = ScaleConfig(
        router=(mesh.router.address,),
        actuator="local",
        model=str(tiny),
        engine=EngineSettings(kv_pool_tokens=8192, threads=1, max_running=PLACES, draft_tokens=0),
        itl_p90_ms=5000,
        ttft_p90_ms=60_000,
        max_prefill=1,
        max_decode=2,
        **QUICK,
    )
    async with open_scale(config) as planner:
        traffic = Traffic(http, mesh, 2 * PLACES + 1, LONG)
        async with traffic.running():
            await until(lambda: len(workers(mesh, "decode")) == 2, "a worker was added", seconds=40)
            [added] = set(workers(mesh, "decode")) - {own}
            seat = mesh.router.planner.registry.find(added)
            await until(lambda: seat.report.running > 0, "it has work", seconds=20)
        await same(traffic.answers, oracle)
        calm = Traffic(http, mesh, 1, SHORT)
        async with calm.running():
            await until(lambda: mesh.router.planner.registry.find(added) is None, "it was taken away", seconds=40)
            assert workers(mesh, "decode") == [own]
        await same(calm.answers, oracle)
        kinds = {kind for kind in ("add", "drain", "remove") if decided(planner, kind, "decode")}
        assert kinds == {"add", "drain", "remove"}
    assert replans.get() == before, "no stream had to move"


def decided(planner, kind: str, role: str) -> float:
    return planner.metrics.decisions.labels(kind, role)._value.get()


async def test_a_worker_changes_its_role_first(tiny, meshes, oracle, http):
    """Three prefill workers idle beside one that decodes; no actuator."""
    setup = MeshSetup(model=tiny, prefill=3, decode=1, engine={"max_running": PLACES, "draft_tokens": 0})
    async with meshes(setup) as mesh:
        config = ScaleConfig(router=(mesh.router.address,), itl_p90_ms=5000, ttft_p90_ms=60_000, **QUICK)
        async with open_scale(config):
            traffic = Traffic(http, mesh, 2 * PLACES + 1, LONG)
            async with traffic.running():
                await until(lambda: len(workers(mesh, "decode")) > 1, "a worker decodes now", seconds=30)
            assert workers(mesh, "prefill")
        await same(traffic.answers, oracle)


async def test_a_dry_run_says_what_it_would_do_and_does_nothing(tiny, meshes, http):
    """The command itself, as a process."""
    setup = MeshSetup(model=tiny, prefill=3, decode=1, engine={"max_running": PLACES, "draft_tokens": 0})
    async with meshes(setup) as mesh:
        command = (sys.executable, "-m", "penstock.cli", "scale", "--router", mesh.router.address, "--dry-run")
        settings = [word for name, value in QUICK.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        process = await asyncio.create_subprocess_exec(
            *command, *settings, "--itl-p90-ms", "5000", stdout=PIPE, stderr=PIPE, env=os.environ
        )
        try:
            async with asyncio.timeout(60), Traffic(http, mesh, 2 * PLACES + 1, LONG).running():
                said = await would(process)
            assert (said["action"], said["role"]) == ("flip", "decode")
            assert "decode workers are needed and 1 are there" in said["reason"]
            assert len(workers(mesh, "decode")) == 1
        finally:
            process.terminate()
            await process.communicate()


async def would(process) -> dict[str, str]:
    """The first line about an action."""
    async for line in process.stderr:
        said = json.loads(line)
        if said["event"] == "would act":
            return said
    raise AssertionError("it has ended")


async def test_where_the_router_is_away_nothing_is_decided():
    config = ScaleConfig(router=("127.0.0.1:1",), **QUICK)
    async with open_scale(config) as planner:
        await until(lambda: planner.metrics.blind._value.get() > 0.5, "it says that it sees nothing")
        assert "penstock_scale_decisions_total{" not in planner.metrics.text().decode()
