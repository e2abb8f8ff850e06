"""Adapters at the router: who may serve a model with one, and how workers are told to load and unload them."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from penstock.router import adapting
from penstock.v1 import router_pb2

from .helpers import Harness, eventually


def adapters(**fingerprints: str) -> list[router_pb2.Adapter]:
    return [
        router_pb2.Adapter(name=name, fingerprint=fingerprint, directory=f"/{name}")
        for name, fingerprint in fingerprints.items()
    ]


async def told(call: grpc.aio.StreamStreamCall) -> router_pb2.AdapterOrder:
    """What a worker is told next of adapters."""
    while not (message := await call.read()).HasField("adapter"):
        pass
    order: router_pb2.AdapterOrder = message.adapter
    return order


def view(mesh: Harness) -> dict[str, tuple[str, str, int]]:
    """Adapter, base and workers of each model."""
    seen = mesh.router.planner.registry.view(mesh.router._clock()).models
    return {one.model: (one.adapter, one.base, one.decode_workers + one.prefill_workers) for one in seen}


async def test_only_workers_that_have_it_serve_it(mesh: Harness) -> None:
    await mesh.join("a", adapters=adapters(one="f1"))
    await mesh.join("b", adapters=adapters(one="f1", two="f2"))
    await mesh.join("c")
    name = mesh.router.planner.registry.get("a").member.model  # type: ignore[union-attr]
    assert view(mesh) == {name: ("", "", 3), f"{name}:one": ("f1", name, 2), f"{name}:two": ("f2", name, 1)}
    for _ in range(3):
        _, plan = await mesh.plan(model_name=f"{name}:two")
        assert plan.decode.member_id == "b"
    with pytest.raises(grpc.aio.AioRpcError, match="is not served here") as caught:
        await mesh.plan(model_name=f"{name}:three")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_of_two_meanings_of_a_name_that_of_most_counts(mesh: Harness) -> None:
    await mesh.join("a", adapters=adapters(one="f1"))
    await mesh.join("b", adapters=adapters(one="f2"))
    late = await mesh.join("c", adapters=adapters(one="f2"))
    name = mesh.router.planner.registry.get("a").member.model  # type: ignore[union-attr]
    assert view(mesh)[f"{name}:one"] == ("f2", name, 2)
    for _ in range(3):
        _, plan = await mesh.plan(model_name=f"{name}:one")
        assert plan.decode.member_id in ("b", "c")
    await late.write(router_pb2.JoinRequest(adapters=router_pb2.Adapters(adapters=adapters(one="f1"))))
    await eventually(lambda: view(mesh)[f"{name}:one"] == ("f1", name, 2))


async def test_all_workers_of_a_model_are_told_and_answer(mesh: Harness) -> None:
    first, second = await mesh.join("a"), await mesh.join("b", "prefill")
    await mesh.join("s", "kvstore")
    request = router_pb2.AdapterRequest(name="one", directory="/one")
    asked = asyncio.ensure_future(mesh.stub.ChangeAdapter(request))
    for call, error in ((first, ""), (second, "it is not there")):
        order = await told(call)
        assert (order.name, order.directory) == ("one", "/one")
        assert not asked.done()
        done = router_pb2.AdapterDone(number=order.number, error=error)
        await call.write(router_pb2.JoinRequest(adapter_done=done))
    found = {one.member_id: (one.answered, one.error) for one in (await asked).workers}
    assert found == {"a": (True, ""), "b": (True, "it is not there")}


async def test_who_leaves_or_is_deaf_does_not_hold_it_up(mesh: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    call = await mesh.join("a")
    request = router_pb2.AdapterRequest(name="one")
    asked = asyncio.ensure_future(mesh.stub.ChangeAdapter(request))
    await told(call)
    await mesh.gone(call)
    [one] = (await asked).workers
    assert (one.member_id, one.answered) == ("a", False)
    monkeypatch.setattr(adapting, "_ANSWER_S", 0.05)
    await mesh.join("deaf")
    await eventually(lambda: len(mesh.router.planner.registry) == 1)
    [one] = (await mesh.stub.ChangeAdapter(request)).workers
    assert (one.member_id, one.answered) == ("deaf", False)
    assert not len(mesh.router.adapting.orders)


async def test_who_joins_is_told_of_what_the_others_have(mesh: Harness) -> None:
    await mesh.join("a", adapters=adapters(one="f1", two="f2"))
    late = await mesh.join("b", adapters=adapters(two="f2"))
    order = await told(late)
    assert (order.number, order.name, order.directory) == (0, "one", "/one")


async def test_a_change_names_a_model_that_is_there(mesh: Harness) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="no worker of '' has joined; there is none") as caught:
        await mesh.stub.ChangeAdapter(router_pb2.AdapterRequest(name="one"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    await mesh.join("a")
    for request, says in (
        (router_pb2.AdapterRequest(), "name = 0 characters"),
        (router_pb2.AdapterRequest(name="one", model_name="nobody"), "no worker of 'nobody' has joined"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=says):
            await mesh.stub.ChangeAdapter(request)
