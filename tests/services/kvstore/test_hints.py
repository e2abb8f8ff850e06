"""Session hints over a real socket: into the table of sessions, and on to the eviction policy."""

from __future__ import annotations

import grpc
import pytest
from tests.services.kvstore.helpers import client_of, puts, raw, refusal, settings

from penstock.kv.client.client import Origin
from penstock.kv.hint import ReturnHint
from penstock.kvstore.service import open_kvstore
from penstock.kvstore.sessions import SessionPhase
from penstock.kvstore.table.table import BlockTable
from penstock.v1 import common_pb2

ACTIVE, TOOL = common_pb2.SESSION_STATE_ACTIVE, common_pb2.SESSION_STATE_TOOL
ENDED = common_pb2.SESSION_STATE_ENDED


def hint(session: str, state: int, returns_in_s: float | None = None) -> common_pb2.SessionHint:
    return common_pb2.SessionHint(session=session, state=state, returns_in_s=returns_in_s)  # type: ignore[arg-type]


async def test_third_parties_say_what_sessions_do(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, ReturnHint]] = []
    monkeypatch.setattr(BlockTable, "expect_session", lambda _store, *said: heard.append(said))
    async with open_kvstore(settings()) as store, raw(store.address) as client:
        await client.stub.Hint(common_pb2.HintRequest(hints=[hint("early", TOOL, 60.0)]))
        await client.attach()
        heard.clear()  # it went to tables without a slot
        said = [hint("a", TOOL, 60.0), hint("b", ENDED), hint("c", ACTIVE), hint("d", 99), hint("", ENDED)]
        await client.stub.Hint(common_pb2.HintRequest(hints=said))
        table = store.store.sessions
        states = [table.known(name).state for name in "abc"]  # type: ignore[union-attr]
        assert states == [SessionPhase.TOOL, SessionPhase.ENDED, SessionPhase.ACTIVE]
        assert table.known("d") is None, "a state of a later version"
        assert (await client.stats()).sessions == 4
    (first, tool), (second, over), (third, active) = heard
    assert (first, second, third) == ("a", "b", "c")
    assert not tool.ended
    assert tool.returns_at == pytest.approx(store.store.now() + 60, abs=30)
    assert (over, active) == (ReturnHint(ended=True), ReturnHint())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (hint("x" * 65, TOOL), "at most 64"),
        (hint("a", TOOL, -1.0), "returns_in_s"),
        (hint("a", TOOL, float("nan")), "returns_in_s"),
    ],
)
async def test_a_hint_that_can_not_be_is_refused(wrong: common_pb2.SessionHint, said: str) -> None:
    async with open_kvstore(settings()) as store, raw(store.address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.Hint(common_pb2.HintRequest(hints=[wrong]))
        code, text = refusal(caught.value)
        assert (code, said in text) == ("INVALID_ARGUMENT", True)
        assert len(store.store.sessions) == 0


async def test_what_is_expected_back_outlives_what_has_ended() -> None:
    """The blocks of the session that waits are the older ones."""
    waits, ended, new = puts(20, "waits"), puts(20, "ended"), puts(40, "new")
    async with (
        open_kvstore(settings(64)) as store,
        client_of(store.address) as client,
        raw(store.address) as other,
    ):
        for blocks, name in ((waits, "waits"), (ended, "ended")):
            await client.put(blocks, Origin(name))
        said = [hint("waits", TOOL, 5.0), hint("ended", ENDED)]
        await other.stub.Hint(common_pb2.HintRequest(hints=said))
        await client.put(new, Origin("new"))
        assert await client.lookup([block.key for block in waits]) == 20
        assert await client.lookup([block.key for block in ended]) == 4
        assert await client.lookup([block.key for block in new]) == 40
