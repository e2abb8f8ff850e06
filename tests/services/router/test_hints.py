"""Session hints through the router: from plans and from Hint, to every store, never in anybody's way."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from tests.services.router.helpers import Harness, eventually

from penstock.router.hints import LiveSessions, Mailbox
from penstock.v1 import common_pb2, router_pb2

ACTIVE, TOOL = common_pb2.SESSION_STATE_ACTIVE, common_pb2.SESSION_STATE_TOOL
USER, ENDED = common_pb2.SESSION_STATE_USER, common_pb2.SESSION_STATE_ENDED


def hint(session: str, state: common_pb2.SessionState.ValueType = TOOL) -> common_pb2.SessionHint:
    return common_pb2.SessionHint(session=session, state=state)


async def heard(store, count: int) -> list[tuple[str, int]]:
    """The next hints that a store is sent."""
    async with asyncio.timeout(10):
        hints: list[tuple[str, int]] = []
        while len(hints) < count:
            message = await store.read()
            if message.HasField("session_hint"):
                hints.append((message.session_hint.session, message.session_hint.state))
    return hints


async def test_a_mailbox_keeps_the_newest_of_each_and_is_bounded() -> None:
    def message(state: common_pb2.SessionState.ValueType) -> router_pb2.JoinResponse:
        return router_pb2.JoinResponse(session_hint=hint("", state))

    mailbox = Mailbox(3)
    for number in range(5):
        mailbox.put(number, message(TOOL))
    mailbox.put(3, message(ENDED))
    assert mailbox.dropped == 2
    reader = mailbox.read()
    assert [await anext(reader) for _ in range(3)] == [message(TOOL), message(TOOL), message(ENDED)]
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    mailbox.put(9, message(USER))
    assert await waiting == message(USER)
    mailbox.put(10, message(USER))
    mailbox.end()
    with pytest.raises(StopAsyncIteration):
        await anext(reader)


async def test_hints_push_out_no_other_message() -> None:
    mailbox = Mailbox(3)
    others = [
        router_pb2.JoinResponse(stores=router_pb2.Stores()),
        router_pb2.JoinResponse(evict=router_pb2.EvictOrder()),
    ]
    for subject, message in zip(("stores", "evict"), others, strict=True):
        mailbox.put(subject, message)
    for number in range(9):
        mailbox.put(("session", str(number)), router_pb2.JoinResponse(session_hint=hint(str(number), TOOL)))
    reader = mailbox.read()
    found = [await anext(reader) for _ in range(3)]
    assert found[:2] == others and found[2].session_hint.session == "8"
    for number in range(5):
        mailbox.put(number, others[0])
    assert mailbox.dropped == 8 + 2


def test_a_session_waits_when_the_last_of_its_requests_has_ended() -> None:
    live = LiveSessions()
    assert live.begin("") is None
    assert live.end("", hint("")) is None
    assert live.begin("a") == hint("a", ACTIVE)
    assert live.begin("a") is None
    assert live.end("a", hint("", ENDED)) is None
    assert live.end("a", hint("somebody else", TOOL)) == hint("a", TOOL), "a plan speaks of its own session only"
    assert live.begin("a") == hint("a", ACTIVE)
    assert live.end("a", None) == hint("a", USER), "a request that broke off"


async def test_a_plan_tells_that_its_session_is_active_and_what_comes_next(mesh: Harness) -> None:
    await mesh.join("w")
    stores = [await mesh.join("s1", "kvstore"), await mesh.join("s2", "kvstore", host_id="other")]
    call, _ = await mesh.plan(session="talk")
    for store in stores:
        assert await heard(store, 1) == [("talk", ACTIVE)]
    await mesh.again(call, session="talk")
    said = common_pb2.SessionHint(session="not mine", state=TOOL, returns_in_s=5.0)
    await call.write(router_pb2.PlanRequest(hint=said))
    await call.done_writing()
    for store in stores:
        message = (await store.read()).session_hint
        assert (message.session, message.state, message.returns_in_s) == ("talk", TOOL, 5.0)


async def test_a_request_that_breaks_off_leaves_its_session_to_the_user(mesh: Harness) -> None:
    await mesh.join("w")
    store = await mesh.join("s", "kvstore")
    call, _ = await mesh.plan(session="talk")
    await mesh.gone(call)
    assert await heard(store, 2) == [("talk", ACTIVE), ("talk", USER)]
    call, _ = await mesh.plan()
    await mesh.gone(call)
    await mesh.stub.Hint(common_pb2.HintRequest(hints=[hint("last")]))
    assert await heard(store, 1) == [("last", TOOL)], "of a request without session nothing is told"


async def test_hints_without_a_request(mesh: Harness) -> None:
    store = await mesh.join("s", "kvstore")
    await mesh.stub.Hint(common_pb2.HintRequest(hints=[hint("a"), hint("b", ENDED), hint("")]))
    assert sorted(await heard(store, 2)) == [("a", TOOL), ("b", ENDED)]
    for wrong in (
        hint("x" * 65),
        common_pb2.SessionHint(session="a", returns_in_s=-1.0),
        common_pb2.SessionHint(session="a", returns_in_s=float("nan")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.stub.Hint(common_pb2.HintRequest(hints=[hint("c"), wrong]))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError, match="hints = 513 entries: must have at most 512"):
        await mesh.stub.Hint(common_pb2.HintRequest(hints=[hint("c")] * 513))
    await mesh.stub.Hint(common_pb2.HintRequest(hints=[hint("d")]))
    assert await heard(store, 1) == [("d", TOOL)], "of a wrong request nothing is passed on"


async def test_a_store_that_does_not_read_holds_up_nobody(mesh: Harness) -> None:
    """Far more hints than a stream takes; the other store hears the last of them all the same."""
    await mesh.join("deaf", "kvstore")
    store = await mesh.join("s", "kvstore")
    for begin in range(0, 100_000, 500):
        hints = [hint(str(number)) for number in range(begin, begin + 500)]
        await mesh.stub.Hint(common_pb2.HintRequest(hints=hints))
    await mesh.stub.Hint(common_pb2.HintRequest(hints=[hint("last")]))
    async with asyncio.timeout(10):
        while (await store.read()).session_hint.session != "last":
            pass
    await mesh.join("w")
    await mesh.plan(session="talk")
    await eventually(lambda: len(mesh.router.planner.ledger) == 1)
