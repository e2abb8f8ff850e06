"""A worker of a mesh does what a router has planned, for whom and with whom it was planned, and nothing else."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from penstock.testing.mesh import MeshSetup
from penstock.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)

from .support import prompt

pytestmark = pytest.mark.attack


TOKENS = prompt("capability", 100)
MINE, ANOTHERS = b"m" * 16, b"a" * 16


@pytest.fixture(scope="module")
async def mesh(tiny, meshes):
    async with meshes(MeshSetup(model=tiny, worker={"handoff_wait_s": 0.2})) as mesh:
        yield mesh


@asynccontextmanager
async def planned(mesh, request_id: str, namespace: bytes = MINE) -> AsyncIterator[router_pb2.PlanResponse]:
    """A plan as a gateway gets it, for the length of the block."""
    ask = router_pb2.PlanAsk(
        model_name="tiny",
        prompt_tokens=len(TOKENS),
        max_tokens=4,
        request_id=request_id,
        namespace=namespace,
        cache_root=namespace * 2,
    )
    async with grpc.aio.insecure_channel(mesh.router.address) as channel:
        call = router_pb2_grpc.RouterStub(channel).Plan()
        await call.write(router_pb2.PlanRequest(ask=ask))
        plan = await call.read()
        assert isinstance(plan, router_pb2.PlanResponse)
        yield plan
        call.cancel()


def request_of(request_id: str, namespace: bytes = MINE) -> common_pb2.Request:
    sampling = common_pb2.Sampling(max_tokens=4, top_p=1.0, repetition_penalty=1.0, ignore_eos=True)
    return common_pb2.Request(
        request_id=request_id,
        prompt_ids=TOKENS,
        sampling=sampling,
        namespace=namespace,
        cache_root=namespace * 2,
    )


def capability_of(plan: router_pb2.PlanResponse, place: router_pb2.Placement) -> common_pb2.Capability:
    return common_pb2.Capability(
        epoch=plan.epoch, prefill=plan.prefill.address, decode=plan.decode.address, mac=place.mac
    )


async def generate(mesh, message: decode_pb2.GenerateRequest) -> list[int]:
    async with grpc.aio.insecure_channel(mesh.decode[0].address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Generate(message)
        return [token.id async for event in call for token in event.tokens]


async def prefill(mesh, message: prefill_pb2.PrefillRequest) -> list[int]:
    async with grpc.aio.insecure_channel(mesh.prefill[0].address) as channel:
        return [event.token.id async for event in prefill_pb2_grpc.PrefillStub(channel).Prefill(message)]


async def refused(call) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return caught.value.details() or ""


async def test_what_was_planned_is_done(mesh):
    name = uuid.uuid4().hex
    async with planned(mesh, name) as plan:
        asked = prefill_pb2.PrefillRequest(request=request_of(name), capability=capability_of(plan, plan.prefill))
        first = await prefill(mesh, asked)
        source = decode_pb2.HandoffSource(address=plan.prefill.address, mac=plan.prefill.mac)
        asked = decode_pb2.GenerateRequest(
            request=request_of(name), capability=capability_of(plan, plan.decode), handoff=source
        )
        rest = await generate(mesh, asked)
    assert len(first) == 1
    assert len(rest) == 3


async def test_a_plan_is_done_once(mesh):
    """Who has seen a request go by can't have it computed again; another plan for it is another capability."""
    name = uuid.uuid4().hex
    async with planned(mesh, name) as plan:
        asked = prefill_pb2.PrefillRequest(request=request_of(name), capability=capability_of(plan, plan.prefill))
        await prefill(mesh, asked)
        assert "it was here before" in await refused(prefill(mesh, asked))
    async with planned(mesh, name) as plan:
        assert "it was here before" in await refused(prefill(mesh, asked))
        asked.capability.CopyFrom(capability_of(plan, plan.prefill))
        await prefill(mesh, asked)


async def test_what_nobody_planned_is_refused(mesh):
    said = await refused(generate(mesh, decode_pb2.GenerateRequest(request=request_of("unplanned"))))
    assert "no router of this worker has planned this" in said
    await refused(prefill(mesh, prefill_pb2.PrefillRequest(request=request_of("unplanned"))))
    forged = common_pb2.Capability(epoch=1, decode=mesh.decode[0].address, mac=bytes(32))
    await refused(generate(mesh, decode_pb2.GenerateRequest(request=request_of("unplanned"), capability=forged)))
    assert mesh.decode[0].worker.metrics.unproven._value.get() >= 2


async def test_a_plan_is_for_its_request_its_tenant_and_its_worker(mesh):
    name = uuid.uuid4().hex
    async with planned(mesh, name) as plan:
        own = capability_of(plan, plan.decode)
        others_tenant = request_of(name, ANOTHERS)
        others_root = request_of(name)
        others_root.cache_root = ANOTHERS * 2
        with_sources = request_of(name)
        with_sources.sources.append("10.0.0.9:7000")
        for request in (others_tenant, others_root, with_sources, request_of("other")):
            await refused(generate(mesh, decode_pb2.GenerateRequest(request=request, capability=own)))
        prefills = capability_of(plan, plan.prefill)
        await refused(generate(mesh, decode_pb2.GenerateRequest(request=request_of(name), capability=prefills)))
        own.prefill = "10.0.0.9:7000"
        source = decode_pb2.HandoffSource(address=own.prefill, mac=plan.prefill.mac)
        await refused(
            generate(mesh, decode_pb2.GenerateRequest(request=request_of(name), capability=own, handoff=source))
        )


async def test_a_worker_connects_to_nobody_else_for_a_hand_off(mesh):
    name = uuid.uuid4().hex
    async with planned(mesh, name) as plan:
        source = decode_pb2.HandoffSource(address="10.0.0.9:7000", mac=plan.prefill.mac)
        asked = decode_pb2.GenerateRequest(
            request=request_of(name), capability=capability_of(plan, plan.decode), handoff=source
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(mesh, asked)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "handoff.address = '10.0.0.9:7000': must be that of the capability" in (caught.value.details() or "")


async def test_a_hand_off_is_for_who_was_told_of_it(mesh):
    """Knowing the request is not enough; and who asks in vain takes it away from nobody."""
    name = uuid.uuid4().hex
    async with planned(mesh, name) as plan, grpc.aio.insecure_channel(mesh.prefill[0].address) as channel:
        asked = prefill_pb2.PrefillRequest(request=request_of(name), capability=capability_of(plan, plan.prefill))
        await prefill(mesh, asked)
        stub = prefill_pb2_grpc.PrefillStub(channel)
        for mac in (b"", bytes(32), plan.decode.mac):
            wanted = prefill_pb2.HandoffRequest(request_id=name, epoch=plan.epoch, mac=mac)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [event async for event in stub.Handoff(wanted)]
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        wanted = prefill_pb2.HandoffRequest(request_id=name, epoch=plan.epoch, mac=plan.prefill.mac)
        events = [event async for event in stub.Handoff(wanted)]
        assert any(event.HasField("done") for event in events)
