"""What a router tells its workers, over real sockets: they answer by what they say of themselves, or they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs
from tests.services.router.helpers import Harness, eventually

from penstock.router import balancing, directing
from penstock.v1 import router_pb2


def command(member: str, force: bool = False, **what: Any) -> router_pb2.CommandRequest:
    return router_pb2.CommandRequest(member=member, command=router_pb2.MemberCommand(**what), force=force)


async def obey(call: Any) -> None:
    """A worker that does what it is told."""
    while True:
        message = (await call.read()).command
        if message.WhichOneof("kind") == "role":
            await call.write(router_pb2.JoinRequest(role=message.role))
        else:
            await call.write(router_pb2.JoinRequest(draining=message.drain))


@asynccontextmanager
async def obedient(*calls: Any) -> Any:
    tasks = [asyncio.create_task(obey(call)) for call in calls]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def served(watch: Any, prefill: int, decode: int) -> None:
    """Returns when gateways see so many workers."""
    async with asyncio.timeout(10):
        async for view in watch:
            if [(model.prefill_workers, model.decode_workers) for model in view.models] == [(prefill, decode)]:
                return


async def test_a_command_returns_when_the_worker_says_so_and_plans_follow(mesh: Harness) -> None:
    one, two = [await mesh.join(name, "decode") for name in ("one", "two")]
    watch = mesh.stub.Watch(router_pb2.WatchRequest())
    mesh.calls.append(watch)
    async with obedient(one, two):
        told = (await mesh.stub.Command(command("one", role=router_pb2.ROLE_PREFILL))).member
        assert (told.member_id, told.role, told.draining) == ("one", router_pb2.ROLE_PREFILL, False)
        await served(watch, 1, 1)
        _, plan = await mesh.plan(tokens=1000)
        assert (plan.prefill.member_id, plan.decode.member_id) == ("one", "two")
        address = (await mesh.stub.Members(router_pb2.MembersRequest())).members[1].address
        assert (await mesh.stub.Command(command(address, force=True, drain=True))).member.member_id == "two"
        await served(watch, 1, 0)
        assert (await mesh.stub.Command(command("two", drain=False))).member.draining is False
        await served(watch, 1, 1)
        assert (await mesh.stub.Command(command("two", drain=False))).member.draining is False, "and again"
        with pytest.raises(grpc.aio.AioRpcError, match=r"command\.exit: must go with drain"):
            await mesh.stub.Command(command("two", drain=False, exit=True))
        with pytest.raises(grpc.aio.AioRpcError, match=r"command\.exit: must go with drain"):
            await mesh.stub.Command(command("two", role=router_pb2.ROLE_PREFILL, exit=True))


async def test_a_worker_that_drains_already_hears_that_it_is_to_end(mesh: Harness) -> None:
    call = await mesh.join("one", "decode")
    await call.write(router_pb2.JoinRequest(draining=True))
    while not (await mesh.stub.Members(router_pb2.MembersRequest())).members[0].draining:
        pass
    await mesh.stub.Command(command("one", drain=True, force=True))  # nothing is to be said
    await mesh.stub.Command(command("one", drain=True, exit=True, force=True))
    while (told := (await call.read())).WhichOneof("kind") != "command":
        pass
    assert (told.command.drain, told.command.exit) == (True, True)


async def test_a_worker_that_does_not_answer_or_leaves(mesh: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directing, "_ANSWER_S", 0.05)
    call = await mesh.join("deaf")
    with pytest.raises(grpc.aio.AioRpcError, match="deaf has not answered within") as caught:
        await mesh.stub.Command(command("deaf", force=True, drain=True))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    monkeypatch.setattr(directing, "_ANSWER_S", 10)
    told = asyncio.ensure_future(mesh.stub.Command(command("deaf", role=router_pb2.ROLE_DECODE)))
    while (await call.read()).command.WhichOneof("kind") != "role":
        pass
    await mesh.gone(call)
    with pytest.raises(grpc.aio.AioRpcError, match="deaf has left the router"):
        await told


async def test_a_worker_that_is_to_end_may_have_left_before_it_says_so(mesh: Harness) -> None:
    """One that is idle ends at once."""
    call = await mesh.join("idle")
    told = asyncio.ensure_future(mesh.stub.Command(command("idle", drain=True, exit=True, force=True)))
    while not (await call.read()).command.exit:
        pass
    await mesh.gone(call)
    assert (await told).member.draining is True


async def test_a_store_has_no_role(mesh: Harness) -> None:
    call = await mesh.join("s", "kvstore")
    await call.write(router_pb2.JoinRequest(role=router_pb2.ROLE_DECODE))
    with pytest.raises(grpc.aio.AioRpcError, match="role: must be that of a worker, and this is a store"):
        while await call.read() is not grpc.aio.EOF:
            pass


async def test_the_balancer_flips_a_worker_and_outlives_one_that_does_not_answer(
    start: Callable[..., Awaitable[Harness]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directing, "_ANSWER_S", 0.05)
    monkeypatch.setattr(balancing, "_LOOK_S", 0.01)
    mesh = await start(balance=True, balance_dwell_s=0.05, silent_s=60.0)
    busy = await mesh.join("busy", "prefill")
    idle, deaf = [await mesh.join(name, "decode") for name in ("idle", "deaf")]
    load = router_pb2.Load(queued_prefill_tokens=100_000, prefill_tokens_per_s=1000, free_kv_tokens=100_000)
    at_rest = router_pb2.Load(free_kv_tokens=100_000, running=1)  # so that the other one has less to do
    with capture_logs() as lines:
        await idle.write(router_pb2.JoinRequest(load=at_rest))
        await deaf.write(router_pb2.JoinRequest(load=router_pb2.Load(free_kv_tokens=100_000)))
        await busy.write(router_pb2.JoinRequest(load=load))
        await eventually(lambda: any(line["event"] == "a worker was not flipped" for line in lines))
        await deaf.write(router_pb2.JoinRequest(load=router_pb2.Load(free_kv_tokens=100_000, running=2)))
        async with obedient(idle):
            registry = mesh.router.planner.registry
            await eventually(lambda: registry.count()["prefill"] == 2)
    seat = registry.get("idle")
    assert seat is not None and seat.member.role is not None and seat.member.role.value == "prefill"
