"""What a router tells people, over real sockets: members with what they did, gateways, sessions, what was weighed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest
from tests.services.router.helpers import BLOCK, Harness, eventually, hello, keys

from penstock.router import drafters, evicting
from penstock.router.sessions import Recent
from penstock.rpc.checkup import own_version
from penstock.v1 import common_pb2, router_pb2

NAMESPACE = bytes(range(16))


async def members(mesh: Harness) -> router_pb2.MembersResponse:
    answer: router_pb2.MembersResponse = await mesh.stub.Members(router_pb2.MembersRequest())
    return answer


async def test_members_tell_what_they_do(mesh: Harness) -> None:
    worker = await mesh.join("w", "both", version="1.2+wire.ab")
    store = await mesh.join("s", "kvstore")
    counts = router_pb2.WorkerCounts(prompts=router_pb2.PromptSources(computed=30, host=70), drafted=10, accepted=4)
    load = router_pb2.Load(
        queued_prefill_tokens=500,
        free_kv_tokens=100_000,
        prefill_tokens_per_s=1000,
        step=router_pb2.StepCost(base_s=0.01),
        counts=counts,
    )
    tier = router_pb2.TierLoad(tier=common_pb2.TIER_HOST, blocks=3, used_bytes=300, bytes=1000)
    await worker.write(router_pb2.JoinRequest(load=load))
    await store.write(router_pb2.JoinRequest(store=router_pb2.StoreLoad(tiers=[tier], asked=8, missed=2)))
    async with asyncio.timeout(10):
        while True:
            answer = await members(mesh)
            told = {one.member_id: one for one in answer.members}
            if told["w"].HasField("counts") and told["s"].HasField("store"):
                break
    assert told["w"].counts == counts and told["w"].version == "1.2+wire.ab"
    assert told["w"].queue_s == pytest.approx(0.5) and told["w"].decode_step_s == pytest.approx(0.01)
    assert (told["w"].max_running, told["w"].kv_capacity_tokens) == (16, 100_000)
    assert list(told["s"].store.tiers) == [tier]
    assert answer.router_id == mesh.router.id and answer.version == own_version()
    await mesh.gone(store)
    await eventually(lambda: len(mesh.router.planner.registry) == 1)
    assert not mesh.router.shown._stores, "what a member said goes with it"


async def test_only_stores_have_tiers_and_not_too_many(mesh: Harness) -> None:
    worker, store = await mesh.join("w"), await mesh.join("s", "kvstore")
    await worker.write(router_pb2.JoinRequest(store=router_pb2.StoreLoad()))
    with pytest.raises(grpc.aio.AioRpcError, match="store: must come from a store, and this is a worker"):
        while await worker.read() is not grpc.aio.EOF:
            pass
    await store.write(router_pb2.JoinRequest(store=router_pb2.StoreLoad(tiers=[router_pb2.TierLoad()] * 9)))
    with pytest.raises(grpc.aio.AioRpcError, match=r"store\.tiers = 9 entries: must have at most 8"):
        while await store.read() is not grpc.aio.EOF:
            pass


async def test_a_draft_service_is_shown_and_gets_no_work(mesh: Harness) -> None:
    draft = await mesh.join("d", "draft", model_name="m")
    [told] = (await members(mesh)).drafts
    assert (told.member_id, told.model_name, told.host_id, told.HasField("load")) == ("d", "m", "h", False)
    load = router_pb2.DraftLoad(workers=2, sequences=5, pages=100, free_pages=30, guessed=70, busy_s=0.5)
    await draft.write(router_pb2.JoinRequest(draft=load))
    async with asyncio.timeout(10):
        while (answer := await members(mesh)).drafts[0].load != load:
            pass
    assert not answer.members and not len(mesh.router.planner.registry)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.stub.Command(router_pb2.CommandRequest(member="d", command=router_pb2.MemberCommand(drain=True)))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    newer = await mesh.join("d", "draft", model_name="other")
    with pytest.raises(grpc.aio.AioRpcError, match="a newer stream of this member has taken over"):
        await draft.read()
    assert [one.model_name for one in (await members(mesh)).drafts] == ["other"]
    await mesh.gone(newer)
    async with asyncio.timeout(10):
        while (await members(mesh)).drafts:
            pass


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (router_pb2.JoinRequest(load=router_pb2.Load()), "after the hello of a draft service: draft or evicted"),
        (
            router_pb2.JoinRequest(draft=router_pb2.DraftLoad(busy_s=-1)),
            r"draft\.busy_s = -1\.0: must be finite and not negative",
        ),
        (
            router_pb2.JoinRequest(evicted=router_pb2.Evicted(tiers=[router_pb2.EvictedBlocks()] * 9)),
            r"evicted\.tiers = 9 entries: must have at most 8",
        ),
    ],
)
async def test_what_a_draft_service_may_not_say(mesh: Harness, said: router_pb2.JoinRequest, error: str) -> None:
    draft = await mesh.join("d", "draft")
    await draft.write(said)
    with pytest.raises(grpc.aio.AioRpcError, match=error):
        await draft.read()


async def test_no_more_draft_services_than_there_is_room_for(mesh: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "MOST_DRAFTERS", 1)
    await mesh.join("d1", "draft")
    second = mesh.stub.Join()
    mesh.calls.append(second)
    await second.write(router_pb2.JoinRequest(hello=hello("d2", "draft")))
    with pytest.raises(grpc.aio.AioRpcError, match="1 draft services are joined already"):
        await second.read()


async def test_gateways_are_known_while_they_watch(mesh: Harness) -> None:
    door = router_pb2.MeshWatcher(address="127.0.0.1:1", http_address="127.0.0.1:2", version="v")
    watch = mesh.stub.Watch(router_pb2.WatchRequest(watcher=door))
    mesh.calls.append(watch)
    await watch.read()
    assert list((await members(mesh)).gateways) == [door]
    await mesh.gone(watch)
    await eventually(lambda: not mesh.router.shown._watchers)
    bad = mesh.stub.Watch(router_pb2.WatchRequest(watcher=router_pb2.MeshWatcher(address="nowhere")))
    with pytest.raises(grpc.aio.AioRpcError, match=r"watcher\.address = 'nowhere': must be host:port"):
        await bad.read()


async def test_sessions_with_what_is_cached_of_them_now(mesh: Harness) -> None:
    await mesh.join("w")
    store = await mesh.join("s", "kvstore")
    chain = keys(6)
    call, _ = await mesh.plan(tokens=6 * BLOCK + 3, block_keys=chain, session="d1", tenant="t")
    await call.write(router_pb2.PlanRequest(progress=router_pb2.PlanProgress(prefill_done=True, generated=7)))
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        pass
    await mesh.plan(tokens=10, session="d2", tenant="u")
    await mesh.plan(tokens=10)
    request = router_pb2.SessionsRequest()
    answer = await mesh.stub.Sessions(request)
    assert [one.session for one in answer.sessions] == ["d2", "d1"], "the latest first, and none without a name"
    first = answer.sessions[1]
    assert (first.tenant, first.model_name, first.decode, first.requests) == ("t", "m", "w", 1)
    assert (first.prompt_tokens, first.answer_tokens, first.cached_tokens) == (6 * BLOCK + 3, 7, 0)
    await mesh.store(store, stored=chain[:4], tier=common_pb2.TIER_HOST)
    await eventually(lambda: len(mesh.router.planner.index) == 4)
    lookups = mesh.router.planner.index._lookups
    [first] = (await mesh.stub.Sessions(router_pb2.SessionsRequest(tenant="t"))).sessions
    assert first.cached_tokens == 4 * BLOCK
    assert mesh.router.planner.index._lookups == lookups, "to look is no lookup"
    assert [one.session for one in (await mesh.stub.Sessions(router_pb2.SessionsRequest(most=1))).sessions] == ["d2"]
    with pytest.raises(grpc.aio.AioRpcError, match="most = 1001: must be at most 1000"):
        await mesh.stub.Sessions(router_pb2.SessionsRequest(most=1001))


async def test_what_was_weighed_is_told_for_the_last_plans(start: Callable[..., Awaitable[Harness]]) -> None:
    mesh = await start(max_recent_plans=2)
    for name in ("w1", "w2"):
        await mesh.join(name)
    plans = [(await mesh.plan(tokens=400 + number))[1] for number in range(3)]
    answer = await mesh.stub.Plans(router_pb2.PlansRequest(plans=[plan.plan for plan in plans]))
    assert [one.plan for one in answer.plans] == [plan.plan for plan in plans[1:]]
    assert (answer.kept, answer.most) == (2, 2)
    last, plan = answer.plans[-1], plans[-1]
    assert last.options[0].decode == plan.decode.member_id, "the chosen one is the first"
    assert {option.decode for option in last.options} == {"w1", "w2"} and last.choices == 2
    chosen, other = last.options
    assert chosen.total_s + chosen.others_s <= other.total_s + other.others_s
    assert chosen.uncached_tokens == 402
    parts = ("queue", "ahead", "compute", "fetch", "pull", "penalty", "handoff", "room", "decode")
    assert sum(getattr(chosen, f"{part}_s") for part in parts) == pytest.approx(chosen.total_s)
    assert plan.reasons.answer_s == pytest.approx(chosen.total_s)


async def read_evict(call: grpc.aio.StreamStreamCall) -> router_pb2.EvictOrder:
    while not (message := await call.read()).HasField("evict"):
        pass
    order: router_pb2.EvictOrder = message.evict
    return order


async def test_an_eviction_is_told_to_all_and_returns_with_their_answers(mesh: Harness) -> None:
    worker, store, draft = await mesh.join("w"), await mesh.join("s", "kvstore"), await mesh.join("d", "draft")
    roots = keys(2, chain=9)
    asked = asyncio.ensure_future(mesh.stub.Evict(router_pb2.EvictRequest(namespace=NAMESPACE, roots=roots)))
    for number, call in enumerate((worker, store, draft), 1):
        order = await read_evict(call)
        assert (order.namespace, list(order.roots)) == (NAMESPACE, roots)
        tiers = [router_pb2.EvictedBlocks(blocks=number, bytes=10 * number, in_use=0)]
        assert not asked.done()
        await call.write(router_pb2.JoinRequest(evicted=router_pb2.Evicted(number=order.number, tiers=tiers)))
    told = {one.member_id: one for one in (await asked).members}
    assert {name: (one.answered, one.tiers[0].blocks) for name, one in told.items()} == {
        "w": (True, 1),
        "s": (True, 2),
        "d": (True, 3),
    }
    assert told["d"].role == router_pb2.ROLE_DRAFT


async def test_who_leaves_or_is_deaf_does_not_hold_up_an_eviction(
    mesh: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, leaving = await mesh.join("s", "kvstore"), await mesh.join("d", "draft")
    asked = asyncio.ensure_future(mesh.stub.Evict(router_pb2.EvictRequest(namespace=NAMESPACE)))
    for call in (store, leaving):
        await read_evict(call)
        await mesh.gone(call)
    assert [(told.member_id, told.answered) for told in (await asked).members] == [("s", False), ("d", False)]
    monkeypatch.setattr(evicting, "_ANSWER_S", 0.05)
    await mesh.join("deaf", "kvstore")
    await eventually(lambda: len(mesh.router.planner.registry) == 1)
    [told] = (await mesh.stub.Evict(router_pb2.EvictRequest(namespace=NAMESPACE))).members
    assert (told.member_id, told.answered) == ("deaf", False)
    assert not len(mesh.router.evictions.orders)


async def test_an_eviction_names_a_tenant(mesh: Harness) -> None:
    for request, says in (
        (router_pb2.EvictRequest(), "namespace is empty: must be that of a tenant"),
        (router_pb2.EvictRequest(namespace=b"short"), "namespace = 5 bytes: must have 0 or 16"),
        (router_pb2.EvictRequest(namespace=NAMESPACE, roots=[b"x"]), r"roots\[0\] = 1 bytes: must have 32"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=says) as caught:
            await mesh.stub.Evict(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_sessions_that_have_expired_are_not_shown() -> None:
    recent: Recent[str, int] = Recent(10, ttl=5.0)
    for at, name in enumerate("abc"):
        recent.set(name, at, float(at))
    recent.expire(6.5)
    assert [key for key, _, _ in recent.items()] == ["c"]
    recent.expire(100.0)
    assert len(recent) == 0
