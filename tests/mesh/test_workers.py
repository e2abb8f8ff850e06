"""A worker that is asked to stop, and one whose engine hangs: the mesh goes on without it, and nothing is lost."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.decode.config import DecodeConfig
from penstock.decode.service import open_decode
from penstock.engine.config import EngineConfig
from penstock.engine.request import SamplingParams
from penstock.rpc.server import LIVE
from penstock.testing.mesh import MeshSetup
from penstock.worker import rotation

from .support import ask, prompt, until

SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = replace(SHORT, max_tokens=1500)


def alone(mesh, model, **settings):
    """Another worker of the mesh."""
    config = DecodeConfig(
        engine=EngineConfig(model, kv_pool_tokens=8192),
        model_name="tiny",
        role="both",
        router=mesh.router.address,
        host_id="test",
        **settings,
    )
    return open_decode(config)


@asynccontextmanager
async def second_worker(mesh, model, **settings):
    """Another worker of the mesh, an event that asks it to stop, and its life."""
    opened = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()

    async def live():
        async with alone(mesh, model, **settings) as served:
            opened.set_result(served)
            await stop.wait()

    async with asyncio.TaskGroup() as tasks:
        life = tasks.create_task(live())
        try:
            yield await opened, stop, life
        finally:
            stop.set()


def members(mesh) -> dict[str, bool]:
    """The workers that the router knows by address, and whether each drains."""
    seats = [seat for seat in mesh.router.planner.registry if seat.member.role is not None]
    return {seat.member.address: seat.draining for seat in seats}


@pytest.fixture
async def mesh(tiny, meshes):
    async with meshes(MeshSetup(model=tiny, aggregated=True, kvstore=False)) as mesh:
        yield mesh


async def test_a_worker_that_is_asked_to_stop_ends_its_streams_while_new_requests_go_elsewhere(
    mesh, tiny, oracle, http
):
    replans = mesh.gateway.metrics.of("tiny").replans
    before = replans._value.get()
    async with second_worker(mesh, tiny, drain_s=60) as (served, stop, life):
        engine = served.worker.engine
        async with asyncio.TaskGroup() as tasks:
            streams = []
            while not engine.stats().running:  # the router spreads them
                tokens = prompt(f"drain/{len(streams)}", 40)
                streams.append((tokens, tasks.create_task(ask(http, mesh, tokens, LONG))))
                await until(lambda: sum(worker_running(mesh, served)) == len(streams), "it runs")
            stop.set()
            await until(lambda: members(mesh).get(served.address) is True, "the router knows that it drains")
            computed = engine.stats().running
            for number in range(4):
                tokens = prompt(f"elsewhere/{number}", 40)
                assert (await ask(http, mesh, tokens, SHORT)).ids == (await oracle(tokens, SHORT)).ids
                assert engine.stats().running <= computed
            assert not life.done(), "it lives until its streams have ended"
        for tokens, stream in streams:
            assert stream.result().ids == (await oracle(tokens, LONG)).ids
        await life
    assert served.address not in members(mesh)
    assert replans._value.get() == before


def worker_running(mesh, *more):
    workers = [*mesh.workers, *(served.worker for served in more)]
    return [worker.engine.stats().running for worker in workers]


async def test_a_worker_whose_step_does_not_end_is_out_of_rotation_until_it_does(mesh, tiny, oracle, http, monkeypatch):
    async with (
        second_worker(mesh, tiny, step_limit_s=0.2) as (served, _, _),
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        assert await status(health) == health_pb2.HealthCheckResponse.SERVING
        runner = served.worker.engine._runner
        step, hang = runner.step, threading.Event()

        def hanging(runs):
            hang.wait(60)
            return step(runs)

        monkeypatch.setattr(runner, "step", hanging)
        try:
            streams = []
            async with asyncio.TaskGroup() as tasks:
                while not served.worker.engine.stats().in_step_s:
                    tokens = prompt(f"hang/{len(streams)}", 40)
                    streams.append((tokens, tasks.create_task(ask(http, mesh, tokens, SHORT))))
                    await asyncio.sleep(0.01)
                await until(lambda: served.address not in members(mesh), "the router has no such member")
                assert await status(health) == health_pb2.HealthCheckResponse.NOT_SERVING
                assert await status(health, LIVE) == health_pb2.HealthCheckResponse.NOT_SERVING, "a supervisor's turn"
                for number in range(3):
                    tokens = prompt(f"beside/{number}", 40)
                    assert (await ask(http, mesh, tokens, SHORT)).ids == (await oracle(tokens, SHORT)).ids
                hang.set()
                await until(lambda: served.address in members(mesh), "the router has it again")
                assert await status(health) == health_pb2.HealthCheckResponse.SERVING
                assert await status(health, LIVE) == health_pb2.HealthCheckResponse.SERVING
            for tokens, stream in streams:
                assert stream.result().ids == (await oracle(tokens, SHORT)).ids
        finally:
            hang.set()


async def status(health, service="") -> int:
    """What the worker says of itself."""
    return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_a_defect_of_the_join_ends_the_worker_with_that_error(mesh, tiny, monkeypatch):
    """It would serve on without work for ever: its supervisor has to start it again."""

    load, victims = rotation.load, []

    def defect(worker):
        if worker in victims:
            raise ZeroDivisionError("a defect of the join")
        return load(worker)

    monkeypatch.setattr(rotation, "load", defect)
    with pytest.raises(ZeroDivisionError, match="a defect of the join"):
        async with alone(mesh, tiny) as served:
            metrics = served.metrics
            victims.append(served.worker)
            async with asyncio.timeout(10):
                await asyncio.Event().wait()
    assert 'penstock_task_failures_total{task="join"} 1.0' in metrics.text().decode()
