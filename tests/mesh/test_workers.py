"""A worker that is asked to stop, and one whose engine hangs: the mesh goes on without it, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.decode.config import DecodeConfig
from penstock.decode.service import open_decode
from penstock.engine.config import EngineConfig
from penstock.engine.request import SamplingParams
from penstock.rpc.server import LIVE
from penstock.testing.checkpoints import TinyModel, write_checkpoint
from penstock.testing.mesh import MeshSetup
from penstock.v1 import router_pb2, router_pb2_grpc
from penstock.worker import opening, rotation

from .support import ask, process, prompt, until

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


@pytest.mark.parametrize("drain_s", [60, 0.2], ids=["in time", "too long"])
async def test_sigterm_drains_a_worker_and_what_does_not_end_in_time_moves(mesh, tiny, oracle, http, drain_s):
    """A process. What runs there ends there, or goes on elsewhere; either way nobody sees more than a pause."""
    settings = ("--router", mesh.router.address, "--model", str(tiny), "--model-name", "tiny", "--host-id", "test")
    settings += ("--role", "both", "--kv-pool-tokens", "8192", "--drain-s", str(drain_s))
    [own], replans = mesh.decode, mesh.gateway.metrics.of("tiny").replans
    before, registry = replans._value.get(), mesh.router.planner.registry
    async with process("decode", *settings) as (address, pid):
        await until(lambda: address in members(mesh), "it has joined", seconds=30)
        for seat in registry:
            seat.drain(seat.member.address == own.address)  # all goes to the process
        prompts = [prompt(f"sigterm/{drain_s}/{number}", 40) for number in range(3)]
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(ask(http, mesh, tokens, LONG)) for tokens in prompts]
            await until(lambda: registry.find(address).report.running == len(streams), "they run there")
            for seat in registry:
                seat.drain(False)
            os.kill(pid, signal.SIGTERM)
            await until(lambda: members(mesh).get(address) in (None, True), "the router knows that it drains")
            tokens = prompt(f"beside/{drain_s}", 40)
            assert (await ask(http, mesh, tokens, SHORT)).ids == (await oracle(tokens, SHORT)).ids
        await until(lambda: address not in members(mesh), "it has left")
    for tokens, stream in zip(prompts, streams, strict=True):
        assert stream.result().ids == (await oracle(tokens, LONG)).ids
    moved = replans._value.get() - before
    assert moved == 0 if drain_s > 1 else moved >= len(streams)


async def test_a_worker_that_is_told_to_drain_and_exit_ends_when_it_is_empty(mesh, tiny, oracle, http):
    """A process. It stays as long as something runs there, whatever `drain-s` says; undrained before, it stays."""
    settings = ("--router", mesh.router.address, "--model", str(tiny), "--model-name", "tiny", "--host-id", "test")
    settings += ("--role", "both", "--kv-pool-tokens", "8192", "--drain-s", "0")
    [own], registry = mesh.decode, mesh.router.planner.registry
    tokens, replans = prompt("exit", 40), mesh.gateway.metrics.of("tiny").replans
    before = replans._value.get()

    async with process("decode", *settings) as (address, pid):
        await until(lambda: address in members(mesh), "it has joined", seconds=30)
        for seat in registry:
            seat.drain(seat.member.address == own.address)  # all goes to the process
        stream = asyncio.ensure_future(ask(http, mesh, tokens, LONG))
        await until(lambda: registry.find(address).report.running == 1, "it runs there")
        async with grpc.aio.insecure_channel(mesh.router.address) as channel:
            router = router_pb2_grpc.RouterStub(channel)
            for command in (router_pb2.MemberCommand(drain=True, exit=True), router_pb2.MemberCommand(drain=False)):
                request = router_pb2.CommandRequest(member=address, command=command, force=True)
                assert (await router.Command(request)).member.draining is command.drain
        assert not stream.done()
        assert (await stream).ids == (await oracle(tokens, LONG)).ids
        tokens = prompt("exit at last", 40)  # not the same again, which lookup would answer before it is told
        stream = asyncio.ensure_future(ask(http, mesh, tokens, LONG))
        await until(lambda: registry.find(address).report.running == 1, "it runs there still")
        for seat in registry:
            seat.drain(False)
        command = (sys.executable, "-m", "penstock.cli", "ctl", "drain", address, "--exit", "--wait")
        told = await asyncio.create_subprocess_exec(*command, "--router", mesh.router.address)
        assert (await stream).ids == (await oracle(tokens, LONG)).ids
        assert replans._value.get() == before, "no stream had to go on elsewhere"
        assert await told.wait() == 0
        assert address not in members(mesh)
        await until(lambda: not psutil.pid_exists(pid), "it has ended")


async def test_a_drained_worker_stays_until_it_is_told_to_end(mesh, tiny):
    settings = ("--router", mesh.router.address, "--model", str(tiny), "--model-name", "tiny", "--host-id", "test")
    async with process("decode", *settings) as (address, pid):
        await until(lambda: address in members(mesh), "it has joined", seconds=30)
        async with grpc.aio.insecure_channel(mesh.router.address) as channel:
            router = router_pb2_grpc.RouterStub(channel)
            drain = router_pb2.MemberCommand(drain=True)
            told = await router.Command(router_pb2.CommandRequest(member=address, command=drain))
            assert (told.member.draining, told.member.running) == (True, 0)
            async with grpc.aio.insecure_channel(address) as own:
                health = health_pb2_grpc.HealthStub(own)
                status = (await health.Check(health_pb2.HealthCheckRequest(service=LIVE))).status
                assert status == health_pb2.HealthCheckResponse.SERVING, "it lives"
            drain.exit = True
            await router.Command(router_pb2.CommandRequest(member=address, command=drain))
        await until(lambda: not psutil.pid_exists(pid), "it has ended")


def worker_running(mesh, *more):
    workers = [*mesh.workers, *(served.worker for served in more)]
    return [worker.engine.stats().running for worker in workers]


@pytest.mark.parametrize("where", ["predicted", "never measured", "between steps"])
async def test_a_worker_whose_step_does_not_end_is_out_of_rotation_until_it_does(
    mesh, tiny, oracle, http, monkeypatch, where
):
    """Its event loop is alive, and reports. Its streams move, within 3 seconds."""
    async with (
        second_worker(mesh, tiny, step_limit_s=0.2) as (served, _, _),
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        engine, health = served.worker.engine, health_pb2_grpc.HealthStub(channel)
        known = where == "predicted"
        while known and not engine.stats().decode_step_s:
            await ask(http, mesh, prompt(f"warm/{engine.stats().steps}", 40), SHORT)
            await asyncio.gather(*(ask(http, mesh, prompt(f"warm/{number}", 40), SHORT) for number in range(4)))
        assert await status(health) == health_pb2.HealthCheckResponse.SERVING
        with (idle if where == "between steps" else hung)(engine, monkeypatch) as go:
            streams = []
            async with asyncio.TaskGroup() as tasks:
                while not served.worker.stats().in_step_s:
                    tokens = prompt(f"hang/{len(streams)}", 40)
                    streams.append((tokens, tasks.create_task(ask(http, mesh, tokens, SHORT))))
                    await asyncio.sleep(0.01)
                await until(lambda: silent(mesh, served), "the router takes it for dead", seconds=3)
                assert bool(engine.stats().expected_s) is known
            for tokens, stream in streams:
                assert stream.result().ids == (await oracle(tokens, SHORT)).ids
            async with asyncio.timeout(3):
                while await status(health, LIVE) == health_pb2.HealthCheckResponse.SERVING:
                    pass  # then it is a supervisor's turn
            assert await status(health) == health_pb2.HealthCheckResponse.NOT_SERVING
            for number in range(3):
                tokens = prompt(f"beside/{number}", 40)
                assert (await ask(http, mesh, tokens, SHORT)).ids == (await oracle(tokens, SHORT)).ids
            go.set()
            await until(lambda: not silent(mesh, served), "the gateway may use it again")
            async with asyncio.timeout(3):
                while await status(health, LIVE) == health_pb2.HealthCheckResponse.NOT_SERVING:
                    pass
            assert await status(health) == health_pb2.HealthCheckResponse.SERVING


async def test_a_worker_that_is_merely_busy_stays(mesh, tiny, oracle, http, monkeypatch):
    """One long step, of which it can tell how long it takes: nobody moves."""
    async with second_worker(mesh, tiny) as (served, _, _):
        engine = served.worker.engine
        monkeypatch.setattr(engine._counters.__class__, "predict", lambda counters, runs, width, tile_s=0.0: 1.0)
        replans = mesh.gateway.metrics.of("tiny").replans
        before = replans._value.get()
        with hung(engine, monkeypatch) as go:
            async with asyncio.TaskGroup() as tasks:
                streams = []
                while not engine.stats().in_step_s:
                    tokens = prompt(f"busy/{len(streams)}", 40)
                    streams.append((tokens, tasks.create_task(ask(http, mesh, tokens, SHORT))))
                    await asyncio.sleep(0.01)
                while engine.stats().in_step_s < 4:
                    assert not silent(mesh, served)
                    await asyncio.sleep(0.05)
                go.set()
        for tokens, stream in streams:
            assert stream.result().ids == (await oracle(tokens, SHORT)).ids
        assert replans._value.get() == before


@contextmanager
def hung(engine, monkeypatch):
    """Steps of the engine do not end until the event is set."""
    step, go = engine._runner.step, threading.Event()

    def hanging(runs):
        go.wait(60)
        return step(runs)

    monkeypatch.setattr(engine._runner, "step", hanging)
    try:
        yield go
    finally:
        go.set()


@contextmanager
def idle(engine, monkeypatch):
    """The engine's loop does not come back from its next rest until the event is set."""
    woken, go = engine._woken, threading.Event()

    async def idling():
        news = await woken()
        while not go.is_set():
            await asyncio.sleep(0.01)
        return news

    monkeypatch.setattr(engine, "_woken", idling)
    try:
        yield go
    finally:
        go.set()


def silent(mesh, served) -> bool:
    """Whether the gateway is told to leave the worker."""
    [seat] = [seat for seat in mesh.router.planner.registry if seat.member.address == served.address]
    return seat.member.id in mesh.gateway.view._silent


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


async def test_a_gateway_that_stands_still_leaves_nothing_running_at_workers_behind_a_unix_socket(
    meshes, http, tmp_path, monkeypatch
):
    """A process, which is stopped. No ping gets through a Unix socket that is full; over TCP the kernel says so."""
    monkeypatch.setattr(opening, "GONE_S", 0.5)
    model = write_checkpoint(tmp_path / "tiny", TinyModel(vocab_size=260, max_positions=1 << 16, seed=3))
    worker, engine = {"address": f"unix:{tmp_path}/worker"}, {"kv_pool_tokens": 1 << 16}
    setup = MeshSetup(model=model, aggregated=True, kvstore=False, worker=worker, engine=engine)
    async with meshes(setup) as mesh:
        settings = ("--router", mesh.router.address, "--model-dir", str(model), "--http-address", "127.0.0.1:0")
        async with process("gateway", *settings) as (address, pid):
            engine = mesh.decode[0].worker.engine
            body = {"model": "tiny", "prompt": prompt("still", 40), "max_tokens": 60_000, "ignore_eos": True}
            asked = asyncio.ensure_future(http.post(f"http://{address}/v1/completions", json=body))
            try:
                await until(lambda: engine.stats().running, "it runs there", seconds=30)
                os.kill(pid, signal.SIGSTOP)
                await until(lambda: not engine.stats().running, "it has ended", seconds=30)
                assert engine.stats().generated_tokens < body["max_tokens"]
            finally:
                asked.cancel()
                await asyncio.wait([asked])
