"""The router over real sockets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from tests.services.router.helpers import BLOCK, Harness, ask, eventually, hello, keys, spec

from penstock.kv.identity import MAX_KEYS
from penstock.rpc.checkup import WIRE, own_version
from penstock.rpc.errors import from_rpc
from penstock.v1 import router_pb2

STORES = [f"s{number}" for number in range(8)]


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
        await call.read()
    return caught.value


async def test_watch_tells_at_once_and_on_change(mesh: Harness) -> None:
    watch = mesh.stub.Watch(router_pb2.WatchRequest())
    mesh.calls.append(watch)
    assert (await watch.read()).models == []
    await mesh.join("p", "prefill")
    view = await watch.read()
    assert [(model.name, model.ready) for model in view.models] == [("m", False)]
    decode = await mesh.join("d", "decode", max_model_len=4096)
    view = await watch.read()
    assert [(model.name, model.ready, model.max_model_len) for model in view.models] == [("m", True, 4096)]
    assert view.models[0].spec == spec()
    await decode.write(router_pb2.JoinRequest(draining=True))
    assert [model.ready for model in (await watch.read()).models] == [False]


async def test_a_silent_worker_is_named_until_it_speaks(start: Callable[..., Awaitable[Harness]]) -> None:
    mesh = await start(silent_s=0.1)
    member = await mesh.join("d", "decode")
    await mesh.join("s", "kvstore")
    watch = mesh.stub.Watch(router_pb2.WatchRequest())
    mesh.calls.append(watch)

    async def view(silent: list[str]) -> router_pb2.MeshView:
        async with asyncio.timeout(10):
            while list((seen := await watch.read()).silent) != silent:
                pass
        return seen

    assert [model.ready for model in (await view(["d"])).models] == [False]
    speaking = asyncio.create_task(speak(member))
    assert [model.ready for model in (await view([])).models] == [True]
    speaking.cancel()
    await asyncio.wait([speaking])
    await view(["d"])
    await mesh.gone(member)
    await view([])


async def test_a_router_that_was_away_blames_nobody(mesh: Harness) -> None:
    """It was stopped, or had no core: whoever spoke meanwhile was not heard."""
    router, away_s = mesh.router, 0.0
    clock = router._clock
    router._clock = lambda: clock() + away_s
    await mesh.join("d", "decode")
    [seat] = router.planner.registry
    heard_at = seat.heard_at
    watch = mesh.stub.Watch(router_pb2.WatchRequest())
    mesh.calls.append(watch)
    away_s = 100.0
    await eventually(lambda: seat.heard_at > heard_at + 99)
    await mesh.join("another", "decode")
    assert [list((await watch.read()).silent) for _ in range(2)] == [[], []]


async def test_a_worker_whose_step_is_overdue_is_named_until_it_has_ended(mesh: Harness) -> None:
    """It speaks, and gets no work."""
    member = await mesh.join("d", "decode")
    watch = mesh.stub.Watch(router_pb2.WatchRequest())
    mesh.calls.append(watch)
    assert not (await watch.read()).silent
    for in_step_s, silent in ((1.9, False), (2.1, True), (0.1, False)):
        progress = router_pb2.Progress(steps=7, in_step_s=in_step_s, limit_s=2.0)
        await member.write(router_pb2.JoinRequest(load=router_pb2.Load(free_kv_tokens=100_000, progress=progress)))
        if in_step_s != 1.9:
            seen = await watch.read()
            assert (list(seen.silent), seen.models[0].ready) == (["d"] * silent, not silent)
        call = mesh.stub.Plan()
        mesh.calls.append(call)
        await call.write(router_pb2.PlanRequest(ask=ask()))
        if silent:
            assert (await refusal(call)).code() is grpc.StatusCode.UNAVAILABLE
        else:
            assert (await call.read()).decode.member_id == "d"


async def speak(member: Any) -> None:
    """Load, over and over."""
    while True:
        await member.write(router_pb2.JoinRequest(load=router_pb2.Load()))
        await asyncio.sleep(0.02)


async def test_end_of_stream_is_out_of_rotation(mesh: Harness) -> None:
    first, second = await mesh.join("a"), await mesh.join("b")
    await mesh.gone(first)
    await eventually(lambda: len(mesh.router.planner.registry) == 1)
    for _ in range(8):
        _, plan = await mesh.plan()
        assert plan.decode.member_id == "b"
    await second.done_writing()
    await eventually(lambda: len(mesh.router.planner.registry) == 0)
    call = mesh.stub.Plan()
    await call.write(router_pb2.PlanRequest(ask=router_pb2.PlanAsk(model_name="m", prompt_tokens=1)))
    error = await refusal(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert from_rpc(error).retry_after == 1.0


async def test_stores_hear_of_each_other(mesh: Harness) -> None:
    first = await mesh.join("s", "kvstore", address="127.0.0.1:1")
    assert list((await first.read()).stores.addresses) == ["127.0.0.1:1"]
    second = await mesh.join("t", "kvstore", address="127.0.0.1:2")
    both = ["127.0.0.1:1", "127.0.0.1:2"]
    assert list((await first.read()).stores.addresses) == list((await second.read()).stores.addresses) == both
    await mesh.gone(second)
    assert list((await first.read()).stores.addresses) == both[:1]
    await first.done_writing()
    assert await first.read() is grpc.aio.EOF


async def test_the_newest_stream_of_a_member_holds_its_seat(mesh: Harness) -> None:
    old = await mesh.join("a", address="127.0.0.1:1")
    await mesh.join("a", address="127.0.0.1:2")
    assert (await refusal(old)).code() is grpc.StatusCode.UNAVAILABLE
    _, plan = await mesh.plan()
    assert plan.decode.address == "127.0.0.1:2"


async def test_another_spec_is_refused_with_the_difference(mesh: Harness) -> None:
    await mesh.join("a")
    call = mesh.stub.Join()
    await call.write(router_pb2.JoinRequest(hello=hello("b", spec=spec(block_size=32))))
    error = await refusal(call)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "block_size is 32 here and 16 there" in (error.details() or "")
    await mesh.join("c", model_name="another", spec=spec(block_size=32))


@pytest.mark.parametrize("role", ["both", "kvstore", "gateway"])
async def test_another_wire_is_refused_with_both_versions(mesh: Harness, role: str) -> None:
    """Also by a gateway: nothing of what follows would be understood. Who says none has the first."""
    told = {"version": "9.9", "wire": WIRE + 1}
    if role == "gateway":
        watcher = router_pb2.MeshWatcher(address="127.0.0.1:2", http_address="127.0.0.1:3", **told)
        call = mesh.stub.Watch(router_pb2.WatchRequest(watcher=watcher))
    else:
        call = mesh.stub.Join()
        await call.write(router_pb2.JoinRequest(hello=hello("a", role, **told)))
    error = await refusal(call)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    said = error.details() or ""
    assert f"version 9.9 has wire {WIRE + 1}" in said and f"{own_version()} has wire {WIRE}" in said
    assert not mesh.router.planner.registry.get("a")
    await mesh.join("b", wire=1)
    await mesh.join("c")


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("hello.member_id", {"member_id": "no spaces"}),
        ("hello.role", {"role": 0}),
        ("hello.address", {"address": "nowhere"}),
        ("hello.model_name", {"model_name": ""}),
        ("hello.max_running", {"max_running": 0}),
        ("hello.kv_capacity_tokens", {"kv_capacity_tokens": 0}),
        ("hello.spec", {"spec": spec(block_bytes=0)}),
        ("hello.spec.layout", {"spec": spec(layout="x" * 513)}),
        ("hello.host_id", {"host_id": "x" * 513}),
        ("hello.plan_key", {"plan_key": b"short"}),
        ("hello.adapters", {"adapters": [router_pb2.Adapter(name=f"a{n}", fingerprint="f") for n in range(1025)]}),
    ],
)
async def test_a_bad_hello_is_refused_with_its_field(mesh: Harness, field: str, fields: dict[str, Any]) -> None:
    call = mesh.stub.Join()
    message = hello("a")
    message.MergeFrom(router_pb2.Hello())
    for name, value in fields.items():
        if name == "spec":
            message.spec.CopyFrom(value)
        elif name == "adapters":
            message.adapters.extend(value)
        else:
            setattr(message, name, value)
    await call.write(router_pb2.JoinRequest(hello=message))
    error = await refusal(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert from_rpc(error).field == field
    assert len(mesh.router.planner.registry) == 0


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("ask.prompt_tokens", {"prompt_tokens": 0}),
        ("ask.model_name", {"model_name": ""}),
        ("ask.model_name", {"model_name": "x" * 513}),
        ("ask.session", {"session": "x" * 65}),
        ("ask.tenant", {"tenant": "x" * 513}),
        ("ask.avoid", {"avoid": ["a b"]}),
        ("ask.avoid", {"avoid": ["x" * 129]}),
        ("ask.avoid", {"avoid": ["x"] * 257}),
        ("ask.block_keys", {"block_keys": b"k" * 32 + b"short"}),
        ("ask.block_keys", {"block_keys": b"k" * 32 * (MAX_KEYS + 1)}),
        ("ask.after", {"after": b"short"}),
    ],
)
async def test_a_bad_ask_is_refused_with_its_field(mesh: Harness, field: str, fields: dict[str, Any]) -> None:
    """What a router keeps of an ask, for half an hour, has a bound."""
    await mesh.join("a")
    call = mesh.stub.Plan()
    message = ask()
    for name in fields:
        message.ClearField(name)
    message.MergeFrom(router_pb2.PlanAsk(**fields))
    await call.write(router_pb2.PlanRequest(ask=message))
    error = await refusal(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert from_rpc(error).field == field
    assert mesh.router.planner.ledger.empty


async def test_hello_comes_first(mesh: Harness) -> None:
    call = mesh.stub.Join()
    await call.write(router_pb2.JoinRequest(draining=True))
    assert (await refusal(call)).code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "request_",
    [
        router_pb2.JoinRequest(hello=hello("a")),
        router_pb2.JoinRequest(load=router_pb2.Load(prefill_tokens_per_s=float("nan"))),
        router_pb2.JoinRequest(load=router_pb2.Load(decode_step_s=-1)),
        router_pb2.JoinRequest(blocks={"stored": [b"short"]}),
    ],
)
async def test_nonsense_from_a_member_ends_its_stream_only(mesh: Harness, request_: router_pb2.JoinRequest) -> None:
    await mesh.join("good")
    bad = await mesh.join("a")
    await bad.write(request_)
    assert (await refusal(bad)).code() is grpc.StatusCode.INVALID_ARGUMENT
    _, plan = await mesh.plan()
    assert plan.decode.member_id == "good"


async def test_stored_blocks_are_known_until_their_store_leaves(mesh: Harness) -> None:
    await mesh.join("p", "prefill")
    await mesh.join("d", "decode")
    store = await mesh.join("s", "kvstore")
    index = mesh.router.planner.index
    await mesh.store(store, stored=keys(6), snapshot=True)
    await eventually(lambda: len(index) == 6)
    prompt: dict[str, Any] = {"tokens": 20 * BLOCK, "block_keys": keys(20)}
    assert index.match(prompt["block_keys"]) == {"s": 6}
    _, plan = await mesh.plan(**prompt)
    assert plan.prefill.member_id == "p"
    await mesh.store(store, removed=keys(6)[2:])
    await eventually(lambda: len(index) == 2)
    assert index.match(prompt["block_keys"]) == {"s": 2}
    await mesh.gone(store)
    await eventually(lambda: not mesh.router.planner.registry.stores())
    assert index.match(prompt["block_keys"]) == {}


async def test_a_prompt_brings_its_new_keys_alone(mesh: Harness) -> None:
    await mesh.join("p", "prefill")
    await mesh.join("d", "decode")
    store = await mesh.join("s", "kvstore")
    await mesh.store(store, stored=keys(30), snapshot=True)
    await eventually(lambda: len(mesh.router.planner.index) == 30)
    call = mesh.stub.Plan()
    mesh.calls.append(call)

    async def planned(**fields: Any) -> router_pb2.PlanResponse:
        await call.write(router_pb2.PlanRequest(ask=ask(40 * BLOCK, **fields)))
        answer = await call.read()
        assert isinstance(answer, router_pb2.PlanResponse)
        return answer

    unknown = await planned(block_keys=keys(30)[20:], after=keys(20)[-1])
    assert unknown.keys_wanted and not unknown.HasField("decode") and not unknown.epoch
    assert mesh.router.planner.ledger.empty
    await planned(block_keys=keys(20))
    whole = await planned(block_keys=keys(30)[20:], after=keys(20)[-1])
    assert (whole.keys_wanted, whole.reasons.cached_tokens) == (False, 30 * BLOCK)
    again = await planned(after=keys(30)[-1])
    assert again.reasons.cached_tokens == 30 * BLOCK
    other = await planned(after=keys(30)[-1], tenant="other")
    assert other.keys_wanted and mesh.router.planner.ledger.empty


async def test_a_snapshot_forgets_what_was_before(mesh: Harness) -> None:
    await mesh.join("d")
    store = await mesh.join("s", "kvstore")
    await mesh.store(store, stored=keys(3), snapshot=True)
    await mesh.store(store, stored=keys(1), snapshot=True)
    await eventually(lambda: len(mesh.router.planner.index) == 1)
    assert mesh.router.planner.index.match(keys(3)) == {"s": 1}


async def test_blocks_in_a_workers_pages_are_known_until_it_leaves(mesh: Harness) -> None:
    holder = await mesh.join("a")
    await mesh.join("b")
    await mesh.store(holder, stored=keys(1, 7), snapshot=True)
    await mesh.store(holder, stored=keys(6), snapshot=True)
    index = mesh.router.planner.index
    await eventually(lambda: index.match(keys(6)) == {"a": 6})
    assert index.match(keys(1, 7)) == {}, "the snapshot came after it"
    for _ in range(8):
        _, plan = await mesh.plan(tokens=10 * BLOCK, block_keys=keys(10))
        reasons = plan.reasons
        assert plan.decode.member_id == "a"
        assert (reasons.resident_tokens, reasons.cached_tokens, reasons.uncached_tokens) == (96, 96, 64)
        await mesh.gone(mesh.calls[-1])
        await eventually(lambda: mesh.router.planner.ledger.empty)
    assert 'penstock_planned_tokens_total{source="worker"} 768.0' in mesh.router.metrics.text().decode()
    await mesh.store(holder, removed=keys(6)[4:])
    await eventually(lambda: index.match(keys(6)) == {"a": 4})
    await mesh.gone(holder)
    await eventually(lambda: len(mesh.router.planner.registry) == 1)
    assert index.match(keys(6)) == {}


async def test_a_short_tail_is_left_to_decode(mesh: Harness) -> None:
    await mesh.join("p", "prefill")
    await mesh.join("d", "decode")
    store = await mesh.join("s", "kvstore")
    await mesh.store(store, stored=keys(100))
    await eventually(lambda: len(mesh.router.planner.index) == 100)
    _, plan = await mesh.plan(tokens=100 * BLOCK + 20, block_keys=keys(100))
    assert not plan.HasField("prefill")
    _, plan = await mesh.plan(tokens=100 * BLOCK + 200, block_keys=keys(100))
    assert plan.HasField("prefill")


@pytest.mark.parametrize("who", ["p", "d"])
async def test_a_worker_that_has_lost_its_store_has_no_part_in_hand_offs(mesh: Harness, who: str) -> None:
    calls = {"p": await mesh.join("p", "prefill"), "d": await mesh.join("d", "decode")}
    seat = mesh.router.planner.registry.get(who)
    assert seat is not None
    for away in (False, True, False):
        load = router_pb2.Load(free_kv_tokens=100_000, store_away=away)
        await calls[who].write(router_pb2.JoinRequest(load=load))
        await eventually(lambda away=away: seat.reported_at > 0 and seat.report.store_away is away)
        call, plan = await mesh.plan(tokens=1000)
        assert plan.HasField("prefill") is not away
        await mesh.gone(call)
        await eventually(lambda: mesh.router.planner.ledger.empty)


async def test_each_stream_counts_its_plans_from_elsewhere(mesh: Harness) -> None:
    """What was proved for an earlier stream of a request is proved for no later one."""
    await mesh.join("a")
    epochs = []
    for _ in range(8):
        call, plan = await mesh.plan()
        epochs.append(plan.epoch)
        await mesh.gone(call)
    assert len(set(epochs)) == 8


async def test_asking_again_replaces_the_plan(mesh: Harness) -> None:
    for member in ("a", "b"):
        await mesh.join(member)
    call, plan = await mesh.plan()
    again = await mesh.again(call, avoid=[plan.decode.member_id])
    assert again.epoch == plan.epoch + 1
    assert {plan.decode.member_id, again.decode.member_id} == {"a", "b"}
    ledger = mesh.router.planner.ledger
    assert len(ledger) == 1
    assert ledger.of(plan.decode.member_id).sequences == 0


async def test_a_fault_counts_once_however_often_its_request_asks(mesh: Harness) -> None:
    for member in ("a", "b"):
        await mesh.join(member)
    call, _ = await mesh.plan()
    seat = mesh.router.planner.registry.get("a")
    assert seat is not None
    await mesh.again(call, avoid=["a"])
    assert (blamed_until := seat.suspect_until) > 0
    await mesh.again(call, avoid=["a"])
    assert seat.suspect_until == blamed_until
    await mesh.plan(avoid=["a"])
    assert seat.suspect_until > blamed_until, "another request"


async def test_the_last_way_is_taken_though_it_failed_before(mesh: Harness) -> None:
    await mesh.join("d", "decode")
    await mesh.join("p", "prefill")
    _, plan = await mesh.plan(avoid=["d", "p"])
    assert plan.decode.member_id == "d"
    assert not plan.HasField("prefill")


async def test_progress_releases_the_prefill_part(mesh: Harness) -> None:
    await mesh.join("p", "prefill")
    await mesh.join("d", "decode")
    call, plan = await mesh.plan(tokens=1000)
    ledger = mesh.router.planner.ledger
    assert (plan.prefill.member_id, ledger.of("p").prefill_tokens, ledger.of("d").context_tokens) == ("p", 1000, 1050)
    await call.write(router_pb2.PlanRequest(progress=router_pb2.PlanProgress(prefill_done=True)))
    await eventually(lambda: ledger.of("p").prefill_tokens == 0)
    await call.write(router_pb2.PlanRequest(progress=router_pb2.PlanProgress(generated=80)))
    await eventually(lambda: ledger.of("d").context_tokens == 1080)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    await eventually(lambda: ledger.empty)


async def test_aborted_streams_leave_nothing_charged(mesh: Harness) -> None:
    for member in ("a", "b"):
        await mesh.join(member, "decode")
    await mesh.join("p", "prefill")

    async def one(number: int) -> None:
        call = mesh.stub.Plan()
        await call.write(router_pb2.PlanRequest(ask=router_pb2.PlanAsk(model_name="m", prompt_tokens=100 + number)))
        if number % 4 > 0:
            await call.read()
        if number % 4 > 1:
            await call.write(router_pb2.PlanRequest(progress=router_pb2.PlanProgress(prefill_done=True, generated=300)))
        if number % 4 > 2:
            await call.write(router_pb2.PlanRequest(ask=router_pb2.PlanAsk()))  # refused
            await refusal(call)
        call.cancel()

    async with asyncio.TaskGroup() as tasks:
        for number in range(60):
            tasks.create_task(one(number))
    ledger = mesh.router.planner.ledger
    await eventually(lambda: ledger.empty)
    assert (len(ledger), ledger.of("a").context_tokens, ledger.of("p").prefill_tokens) == (0, 0, 0)


async def test_a_charge_outlives_its_member(mesh: Harness) -> None:
    worker = await mesh.join("a")
    call, _ = await mesh.plan()
    await mesh.gone(worker)
    await eventually(lambda: len(mesh.router.planner.registry) == 0)
    assert len(mesh.router.planner.ledger) == 1
    await mesh.gone(call)
    await eventually(lambda: mesh.router.planner.ledger.empty)


async def test_what_a_router_that_has_gone_had_planned_is_charged_here(mesh: Harness) -> None:
    await mesh.join("p", "prefill")
    await mesh.join("d", "decode")
    await mesh.join("d2", "decode")
    ledger = mesh.router.planner.ledger
    kept = router_pb2.Kept(prefill="p", decode="d", plan="x/1")
    call, answer = await mesh.plan(tokens=100, kept=kept, session="s")
    assert (answer.decode.member_id, answer.prefill.member_id) == ("d", "p")
    assert answer.plan not in ("", "x/1")
    assert ledger.of("p").prefill_tokens == 100
    assert ledger.of("d").context_tokens > 100
    assert ledger.of("d").sequences == 1
    await call.write(router_pb2.PlanRequest(progress=router_pb2.PlanProgress(prefill_done=True, generated=7)))
    await eventually(lambda: ledger.of("p").prefill_tokens == 0)
    await mesh.gone(call)
    await eventually(lambda: ledger.empty)
    _, later = await mesh.plan(tokens=100, session="s")
    assert later.reasons.home, "the session was there"
    call, _ = await mesh.plan(tokens=100, kept=router_pb2.Kept(prefill="gone", decode="d2"), output_tokens=9)
    assert ledger.of("d2").prefill_tokens == 0, "there are tokens, so the prompt is computed"
    bad = mesh.stub.Plan()
    await bad.write(router_pb2.PlanRequest(ask=ask(kept=router_pb2.Kept(decode="nobody"))))
    error = await refusal(bad)
    assert (error.code(), from_rpc(error).field) == (grpc.StatusCode.NOT_FOUND, "ask.kept.decode")


async def test_where_others_plan_too_what_a_worker_reports_is_not_doubted(mesh: Harness) -> None:
    """A report beyond the own charges is the work of another router, not work that was counted twice."""
    for member, routers in (("alone", 1), ("shared", 2)):
        call = await mesh.join(member, routers=routers)
        await call.write(router_pb2.JoinRequest(load=router_pb2.Load(running=4, queued_prefill_tokens=5000)))
        seat = mesh.router.planner.registry.get(member)
        assert seat is not None
        await eventually(lambda: seat.report.running == 4)  # noqa: B023
        await mesh.plan(kept=router_pb2.Kept(decode=member), tokens=300)
    planner = mesh.router.planner
    ahead = {seat.member.id: planner._observer.ahead(seat)[:2] for seat in planner.registry}
    assert ahead == {"alone": (5000, 4), "shared": (5300, 5)}


async def test_too_many_live_plans_are_refused_at_once(start: Callable[..., Awaitable[Harness]]) -> None:
    mesh = await start(max_live_plans=2)
    await mesh.join("a")
    calls = [(await mesh.plan())[0] for _ in range(2)]
    extra = mesh.stub.Plan()
    await extra.write(router_pb2.PlanRequest(ask=router_pb2.PlanAsk(model_name="m", prompt_tokens=5)))
    error = await refusal(extra)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert from_rpc(error).retry_after == 1.0
    await mesh.gone(calls[0])
    await eventually(lambda: len(mesh.router.planner.ledger) == 1)
    await mesh.plan()


async def test_a_queue_without_end_is_refused(start: Callable[..., Awaitable[Harness]]) -> None:
    mesh = await start(max_queue_s=10)
    await mesh.join("a")
    for _ in range(3):  # 2,000 tokens per second are assumed of a worker that has not measured
        await mesh.plan(tokens=8000)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        for _ in range(10):
            await mesh.plan(tokens=8000)
    assert from_rpc(caught.value).code == "queue_full"
    assert (from_rpc(caught.value).retry_after or 0) > 0


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model_name": "other"}, grpc.StatusCode.NOT_FOUND),
        ({"tokens": 9000}, grpc.StatusCode.OUT_OF_RANGE),
        ({"block_keys": [b"x"]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"tokens": 0}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_an_impossible_ask_is_refused(mesh: Harness, fields: dict[str, Any], code: grpc.StatusCode) -> None:
    await mesh.join("a")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.plan(**fields)
    assert caught.value.code() is code


@pytest.mark.parametrize("holders", [0, 1, 8])
async def test_a_burst_with_one_common_prefix_is_spread(start: Callable[..., Awaitable[Harness]], holders: int) -> None:
    mesh = await start(hold_s=1000.0)
    stores = [await mesh.join(f"s{number}", "kvstore", host_id=f"h{number}") for number in range(8)]
    for number in range(8):
        await mesh.join(f"w{number}", host_id=f"h{number}")
    for store in stores[:holders]:
        await mesh.store(store, stored=keys(64))
    await eventually(lambda: all(store in mesh.router.planner.index.match(keys(64)) for store in STORES[:holders]))
    async with asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(mesh.plan(tokens=64 * BLOCK + 100, block_keys=keys(64), max_tokens=200))
            for _ in range(96)
        ]
    placed = Counter(task.result()[1].decode.member_id for task in asked)
    if holders == 1:  # who has the prefix may take more requests, not more work
        placed = Counter({f"w{n}": mesh.router.planner.ledger.of(f"w{n}").prefill_tokens for n in range(8)})
        assert min(placed.values()) > 0
    assert max(placed.values()) <= 1.2 * placed.total() / 8


async def test_members_and_plans_are_counted(mesh: Harness) -> None:
    await mesh.join("a")
    await mesh.plan()
    text = mesh.router.metrics.text().decode()
    assert 'penstock_members{role="both"} 1.0' in text
    assert 'penstock_plans_total{prefill="decode"} 1.0' in text


async def test_leaving_is_quick_with_streams_open(start: Callable[..., Awaitable[Harness]]) -> None:
    mesh = await start()
    await mesh.join("a")
    await mesh.plan()
    assert len(mesh.router.planner.ledger) == 1
    # The fixture closes the router while both streams are open; the time limit of the test is the assertion.


async def test_what_became_of_predictions_is_counted(mesh: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all, and what it means for each worker that is there."""
    worker = await mesh.join("a")
    call, _ = await mesh.plan(tokens=1000)
    clock = mesh.router.planner._clock
    monkeypatch.setattr(mesh.router.planner, "_clock", lambda: clock() + 1.0)
    await call.write(router_pb2.PlanRequest(progress=router_pb2.PlanProgress(prefill_done=True, generated=1)))
    counted, bias = 'penstock_plan_error_ratio_count{what="first_token"} 1.0', 'penstock_plan_bias{member="a"'
    await eventually(lambda: counted in mesh.router.metrics.text().decode())
    assert bias in mesh.router.metrics.text().decode()
    await mesh.gone(worker)
    await eventually(lambda: bias not in mesh.router.metrics.text().decode())
    assert counted in mesh.router.metrics.text().decode()
