"""A model whose second stage another host computes: processes that die, certificates, and what is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest
from tests.libs.engine.rank_threads import RankThread

from penstock.cli import authority
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.errors import EngineClosed
from penstock.engine.ranks.distance import ENCODER, FROM_STAGE, Answered
from penstock.engine.ranks.hosting import host_stage
from penstock.engine.ranks.messages import receive, send
from penstock.engine.request import Request, SamplingParams
from penstock.errors import Forbidden, Refused
from penstock.rpc.channels import open_channels
from penstock.rpc.checkup import own_version
from penstock.rpc.errors import from_rpc
from penstock.rpc.identity import MemberIdentity
from penstock.runtime.config import ConfigError
from penstock.stage import service
from penstock.stage.config import StageConfig
from penstock.stage.service import open_stage
from penstock.testing.checkpoints import TinyModel, write_checkpoint
from penstock.testing.mesh import MeshSetup
from penstock.v1 import stage_pb2, stage_pb2_grpc
from penstock.worker.config import WorkerConfig
from penstock.worker.stages.speaking import StagesAway
from penstock.worker.stages.way import StageWay

from .support import GREEDY, ask, process, prompt, until

LONG = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)


def opened(model, *hosts, member_tls=None):
    """An engine whose stages but the first are computed by these hosts."""
    config = EngineConfig(model=model, kv_pool_tokens=4096, threads=1, pp=1 + len(hosts))
    return Engine.open(config, load=StagesAway(hosts, member_tls).load)


async def said(engine, tokens, sampling=GREEDY):
    request = Request("r", tokens, sampling)
    return [token.token async for update in engine.generate(request) for token in update.tokens]


@pytest.fixture
async def plain(tiny):
    async with Engine.open(EngineConfig(model=tiny, kv_pool_tokens=4096)) as engine:
        yield await said(engine, prompt("hosts", 150))


async def test_a_host_that_is_killed_takes_its_worker_out(tiny, plain):
    """Within a second: what runs fails and goes on elsewhere. A host that is there again computes for the next."""
    async with process("stage", "--model", str(tiny)) as (address, pid):
        async with opened(tiny, address) as engine:
            assert await said(engine, prompt("hosts", 150)) == plain
            stream = engine.generate(Request("long", prompt("hosts", 20), LONG))
            await anext(stream)
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(1):
                with pytest.raises(EngineClosed):
                    async for _ in stream:
                        pass
                await engine.lost.wait()
    async with process("stage", "--model", str(tiny)) as (address, _), opened(tiny, address) as engine:
        assert await said(engine, prompt("hosts", 150)) == plain


async def test_a_rank_that_is_killed_there_takes_the_worker_out(tiny):
    """Also while nothing runs."""
    async with process("stage", "--model", str(tiny)) as (address, pid), opened(tiny, address) as engine:
        (rank,) = ranks(pid)
        os.kill(rank, signal.SIGKILL)
        async with asyncio.timeout(2):
            await engine.lost.wait()


def ranks(pid):
    """The processes of a host that compute its stage."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            parent = int(Path("/proc", name, "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == pid and "penstock.engine.forward.following" in Path("/proc", name, "cmdline").read_text():
                found.append(int(name))
    return found


async def test_nothing_is_left_of_a_worker_that_is_killed(tiny, plain):
    """Its host computes for the next one."""
    async with process("stage", "--model", str(tiny)) as (address, pid):
        settings = ("--model", str(tiny), "--pp", "2", "--stage-hosts", address, "--threads", "1")
        async with process("decode", *settings) as (_, worker):
            before = ranks(pid)
            assert len(before) == 1
            os.kill(worker, signal.SIGKILL)
            async with opened(tiny, address) as engine:
                [rank] = ranks(pid)
                assert rank not in before
                assert await said(engine, prompt("hosts", 150)) == plain


async def test_three_hosts_compute_one_model(tiny, plain):
    """What a stage has made goes on by way of the worker's host."""
    async with open_stage(StageConfig(model=tiny)) as one, open_stage(StageConfig(model=tiny, threads=1)) as two:
        async with opened(tiny, one.address, two.address) as engine:
            assert await said(engine, prompt("hosts", 150)) == plain


async def test_a_second_worker_waits_until_the_first_has_ended(tiny, plain):
    async def later():
        async with opened(tiny, stage.address) as engine:
            return await said(engine, prompt("hosts", 150))

    async with open_stage(StageConfig(model=tiny)) as stage:
        async with opened(tiny, stage.address) as engine:
            second = asyncio.create_task(later())
            await until(lambda: figure(stage, "penstock_stage_workers_waiting") == 1, "a worker that waits")
            assert await said(engine, prompt("hosts", 150)) == plain
            assert not second.done()
        assert await second == plain
        assert figure(stage, "penstock_stage_workers_total") == 2
        assert figure(stage, "penstock_stage_workers_waiting") == 0


async def test_a_host_that_is_told_to_end_has_its_worker_drain(tiny, meshes, http, oracle):
    """The worker wants nothing new, ends what runs, and then itself; the host waits for it."""
    long = replace(GREEDY, max_tokens=300)
    expected = await oracle(prompt("drains", 50), long)
    async with process("stage", "--model", str(tiny), "--drain-s", "30") as (address, pid):
        setup = MeshSetup(
            model=tiny, aggregated=True, engine={"pp": 2, "threads": 1}, worker={"stage_hosts": (address,)}
        )
        async with meshes(setup) as mesh:
            [served] = mesh.decode
            running = asyncio.create_task(ask(http, mesh, prompt("drains", 50), long))
            await until(lambda: served.worker.engine.stats().generated_tokens > 20, "a stream")
            os.kill(pid, signal.SIGTERM)
            await served.worker.engine.leaving.wait()
            assert not running.done()
            assert (await running).ids == expected.ids
            await served.done.wait()
            assert not served.worker.engine.lost.is_set() and ranks(pid)
        await until(lambda: not Path("/proc", str(pid)).exists(), "the host's end")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nobody.invalid:7300"])
async def test_a_worker_that_waits_for_its_host_can_be_ended(tiny, address):
    """SIGTERM, while nobody answers there; it has said so."""
    settings = ("--model", str(tiny), "--pp", "2", "--stage-hosts", address, "--threads", "1")
    command = [sys.executable, "-m", "penstock.decode", *settings]
    child = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(30):
            while "waits for the host of a stage" not in (line := (await child.stderr.readline()).decode()):
                assert line
            assert address in line
            child.terminate()
            assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


class Refuses(RankThread):
    """A rank that can't load, and ends."""

    def _follow(self):
        receive(self._socket)
        send(self._socket, b"it has no memory")
        self.kill()


async def test_the_reason_of_a_rank_reaches_the_worker(tiny, monkeypatch):
    monkeypatch.setattr(service, "host_stage", partial(host_stage, launch=Refuses))
    async with open_stage(StageConfig(model=tiny)) as stage:
        with pytest.raises(ConfigError, match="it has no memory"):
            async with opened(tiny, stage.address):
                pass


async def test_who_sends_much_waits_until_it_is_taken():
    """A host that is slow, or a worker, does not fill the other's memory."""
    way, other = StageWay(), StageWay()
    messages, size, most = 400, 1 << 20, 66 << 20

    async def write():
        await asyncio.to_thread(lambda: [way.send(bytes(size)) for _ in range(messages)])

    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(write())
        tasks.create_task(other.read(way.parts()))
        await until(lambda: other.unread >= 64 << 20 and way.unsent >= 64 << 20, "much on both sides")
        for _ in range(messages):
            assert other.unread <= most and way.unsent <= most
            assert len(await asyncio.to_thread(other.receive)) == size
        await writing
        way.close()
    with pytest.raises(EOFError):
        other.receive()


def figure(stage, name):
    return stage.metrics.registry.get_sample_value(name)


async def test_members_show_certificates(tiny, plain, tmp_path, meshes, http, oracle):
    """A worker speaks to a host of a stage, and nobody else does."""
    authority.init(directory=tmp_path / "ca")

    def issue(role):
        if not (tmp_path / role).exists():
            authority.issue(role, role, directory=tmp_path / "ca", out=tmp_path / role, hosts=())
        return tmp_path / role

    setup = MeshSetup(model=tiny, aggregated=True, engine={"pp": 2, "threads": 1}, stages_away=True, members=issue)
    async with meshes(setup) as mesh:
        expected = await oracle(prompt("hosts", 150), GREEDY)
        assert (await ask(http, mesh, prompt("hosts", 150), GREEDY)).ids == expected.ids
        [stage] = mesh.stages
        async with open_channels(MemberIdentity.of(issue("gateway"))) as channels:
            call = stage_pb2_grpc.StageStub(channels.to(stage.address, "stage")).Compute(iter(()))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(aiter(call))
            assert isinstance(from_rpc(refused.value), Forbidden)


async def test_another_model_is_refused(tiny, tmp_path):
    """Of the same shape: its weights tell."""
    other = write_checkpoint(tmp_path / "other", TinyModel(seed=77))
    async with open_stage(StageConfig(model=other)) as stage:
        with pytest.raises(ConfigError, match=r"stage_hosts = .*is another model than the worker's"):
            async with opened(tiny, stage.address):
                pass


async def test_another_version_is_refused(tiny):
    async with open_stage(StageConfig(model=tiny)) as stage, open_channels() as channels:
        stub = stage_pb2_grpc.StageStub(channels.to(stage.address, "stage"))
        for parts in ([], [stage_pb2.StagePart(content=b"?", version="0.0.0")]):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(aiter(stub.Compute(iter(parts))))
            error = from_rpc(refused.value)
            assert isinstance(error, Refused) and own_version() in error.message


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, ENCODER.encode(Answered(""))])
async def test_what_no_worker_says_ends_its_stream_alone(tiny, plain, content):
    async with open_stage(StageConfig(model=tiny)) as stage, open_channels() as channels:
        stub = stage_pb2_grpc.StageStub(channels.to(stage.address, "stage"))
        call = stub.Compute(said_first(stage_pb2.StagePart(content=content, version=own_version())))
        async with asyncio.timeout(10):
            answers = [FROM_STAGE.decode(part.content) async for part in call]
        assert [answer.reason.partition(":")[0] for answer in answers] == ["the host of a stage"], "and why"
        async with opened(tiny, stage.address) as engine:
            assert await said(engine, prompt("hosts", 150)) == plain


async def said_first(part):
    """And then nothing, for good."""
    yield part
    await asyncio.Event().wait()


def test_there_is_a_host_for_each_stage_but_the_first(tiny):
    engine = EngineConfig(model=tiny, pp=3)
    with pytest.raises(ConfigError, match=r"stage_hosts .*one for each stage but the first: pp is 3"):
        WorkerConfig(engine=engine, stage_hosts=("127.0.0.1:7300",))
