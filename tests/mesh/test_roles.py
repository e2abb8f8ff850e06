"""A worker that is told to drain or to take another role, on a mesh that serves: nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.engine.request import SamplingParams
from penstock.router.config import RouterConfig
from penstock.router.service import open_router
from penstock.testing.mesh import MeshSetup
from penstock.v1 import router_pb2, router_pb2_grpc

from .support import ask, prompt, until

SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = replace(SHORT, max_tokens=400)
WIDE = {"COLUMNS": "240"}
PREFILL, DECODE, BOTH = router_pb2.ROLE_PREFILL, router_pb2.ROLE_DECODE, router_pb2.ROLE_BOTH


@asynccontextmanager
async def asking(address: str) -> AsyncIterator[router_pb2_grpc.RouterStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield router_pb2_grpc.RouterStub(channel)


def role(member: str, role: router_pb2.Role.ValueType, *, force: bool = False) -> router_pb2.CommandRequest:
    return router_pb2.CommandRequest(member=member, command=router_pb2.MemberCommand(role=role), force=force)


def drain(member: str, drain: bool = True, *, force: bool = False) -> router_pb2.CommandRequest:
    return router_pb2.CommandRequest(member=member, command=router_pb2.MemberCommand(drain=drain), force=force)


@pytest.fixture
async def two_routers(tiny, meshes):
    """A mesh of one prefill and two decode workers, and its other router, which gateways prefer."""
    async with open_router(RouterConfig(local_prefill_tokens=64)) as other:
        async with meshes(MeshSetup(model=tiny, decode=2, routers=(other.address,))) as mesh:
            yield mesh, other


async def test_roles_change_and_workers_drain_while_streams_run(two_routers, oracle, http):
    """Same tokens and usage as without; each router hears of what the other one told."""
    mesh, other = two_routers
    [first], (second, third) = mesh.prefill, mesh.decode
    replans = mesh.gateway.metrics.of("tiny").replans
    before = replans._value.get()
    stop, asked = asyncio.Event(), []

    async def stream(number):
        count = 0
        while not stop.is_set():
            tokens = prompt(f"roles/{number}/{count}", 90 + 7 * number)
            asked.append((tokens, await ask(http, mesh, tokens, replace(LONG, max_tokens=40 + 30 * number))))
            count += 1

    async def served(worker, work):
        """Returns when the worker has done some more work of that kind."""
        told = worker.metrics.told.labels(work)._value
        begun = told.get()
        await until(lambda: told.get() > begun, f"{work} at {worker.address}", seconds=30)

    async with asking(mesh.router.address) as one, asking(other.address) as two, asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(stream(number)) for number in range(4)]
        await served(first, "prefill")
        assert first.worker.publisher.lending is None and second.worker.publisher.lending is not None
        for commands, works in (
            ([role(first.address, BOTH), drain(second.address), drain(third.address)], [(first, "decode")]),
            (
                [role(second.address, PREFILL), drain(second.address, False), role(first.address, DECODE)],
                [(second, "prefill"), (first, "decode")],
            ),
            ([role(third.address, BOTH), drain(third.address, False), drain(first.address)], [(third, "decode")]),
            (
                [
                    role(first.address, PREFILL),
                    role(second.address, DECODE),
                    drain(first.address, False),
                    drain(third.address),
                ],
                [(first, "prefill"), (second, "decode")],
            ),
        ):
            for stub, command in zip((one, two, one, two), commands, strict=False):
                told = (await stub.Command(command)).member
                await until(lambda told=told: listed(mesh.router, other, told), "both routers know")
            for worker, work in works:
                await served(worker, work)
                assert worker.worker.publisher.lends is (work == "decode")
        stop.set()
        await asyncio.gather(*streams)
    assert len(asked) >= 8
    for tokens, answer in asked:
        alone = await oracle(tokens, replace(LONG, max_tokens=len(answer.ids)))
        assert answer.ids == alone.ids
        assert answer.finish == "length"
        assert answer.usage["prompt_tokens"] == len(tokens)
        assert answer.usage["completion_tokens"] == len(answer.ids)
    assert replans._value.get() == before, "no stream had to move"


def listed(one, two, told) -> bool:
    """Whether both routers say of a member what one has answered."""
    seats = [router.planner.registry.get(told.member_id) for router in (one, two)]
    names = {PREFILL: "prefill", DECODE: "decode", BOTH: "both"}
    return all(seat.member.role.value == names[told.role] and seat.draining == told.draining for seat in seats)


@pytest.fixture
async def mesh(tiny, meshes):
    async with meshes(MeshSetup(model=tiny)) as mesh:
        yield mesh


async def test_what_cannot_be_told(mesh):
    decode, store = mesh.decode[0].address, mesh.kvstore.address
    nothing = router_pb2.CommandRequest(member=decode, command=router_pb2.MemberCommand())
    async with asking(mesh.router.address) as stub:
        for request, code, says in (
            (drain(""), "INVALID_ARGUMENT", "member: must be the id or the address of a worker"),
            (drain("127.0.0.1:1"), "NOT_FOUND", "member: no worker '127.0.0.1:1' has joined"),
            (drain(store), "INVALID_ARGUMENT", "is a kvstore; must be a worker"),
            (
                role(decode, router_pb2.ROLE_KVSTORE),
                "INVALID_ARGUMENT",
                "command.role: must be prefill, decode",
            ),
            (nothing, "INVALID_ARGUMENT", "command: must be drain or role"),
            (drain(decode), "FAILED_PRECONDITION", "is the only worker that decodes 'tiny'"),
            (role(decode, PREFILL), "FAILED_PRECONDITION", "give another one that role first, or force it"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Command(request)
            assert caught.value.code().name == code
            assert says in caught.value.details()


async def test_a_drained_worker_says_so_and_comes_back(mesh, oracle, http):
    """Its health says that it takes nothing new; a request waits for it, if nobody else is left."""
    worker, tokens = mesh.decode[0], prompt("drained", 60)
    async with asking(mesh.router.address) as stub, grpc.aio.insecure_channel(worker.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Command(drain(worker.address, force=True))).member.draining
        members = (await stub.Members(router_pb2.MembersRequest())).members
        assert [(member.role, member.draining) for member in members] == [
            (PREFILL, False),
            (DECODE, True),
            (router_pb2.ROLE_KVSTORE, False),
        ]
        await says(health, health_pb2.HealthCheckResponse.NOT_SERVING)
        asked = asyncio.create_task(ask(http, mesh, tokens, SHORT))
        assert not (await stub.Command(drain(worker.address, False))).member.draining
        await says(health, health_pb2.HealthCheckResponse.SERVING)
        assert (await asked).ids == (await oracle(tokens, SHORT)).ids


async def says(health, status) -> None:
    async with asyncio.timeout(5):
        while (await health.Check(health_pb2.HealthCheckRequest())).status != status:
            pass


async def test_the_command(mesh):
    """`penstock ctl` from outside: what it shows, what it changes, and what it refuses."""
    prefill, decode = mesh.prefill[0].address, mesh.decode[0].address

    async def ctl(*arguments, exit_code=0):
        command = (sys.executable, "-m", "penstock.cli", "ctl", *arguments, "--router", mesh.router.address)
        child = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, env=os.environ | WIDE)
        out, err = await child.communicate()
        assert child.returncode == exit_code, err.decode()
        return out.decode() or err.decode()

    found = {one["address"]: one for one in json.loads(await ctl("workers", "--json"))}
    assert [found[address]["role"] for address in (prefill, decode)] == ["prefill", "decode"]
    assert found[mesh.kvstore.address]["role"] == "kvstore"
    assert {one["state"] for one in found.values()} == {"ready"}
    assert "only worker that decodes" in await ctl("drain", decode, exit_code=1)
    assert "no worker '127.0.0.1:1' has joined" in await ctl("drain", "127.0.0.1:1", exit_code=1)
    assert '"prefill", "decode", "both"' in (await ctl("role", prefill, "chief", exit_code=2)).replace("'", '"')
    told = json.loads(await ctl("role", found[prefill]["id"], "both", "--json"))
    assert (told["role"], told["state"]) == ("both", "ready")
    shown = await ctl("drain", decode, "--wait")
    assert decode in shown and "drained" in shown
    assert "ready" in await ctl("undrain", decode)
    assert "prefill" in await ctl("role", prefill, "prefill")
