"""Uses of blocks that a worker had in its own pages: they count as those that the store has seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.services.kvstore.helpers import (
    client_of,
    disk_has,
    disk_tier,
    eventually,
    keys,
    puts,
    raw,
    refusal,
    settings,
)

from penstock.kv.client.client import Origin
from penstock.kv.identity import MAX_BATCH
from penstock.kvstore.service import open_kvstore
from penstock.kvstore.sessions import SessionPhase
from penstock.kvstore.table.blocks import Block, Wanted, Written
from penstock.kvstore.table.table import BlockTable
from penstock.v1 import kvstore_pb2

SLOTS = 6
NAMES = keys(4)


class Quiet:
    def block_stored(self, block: Block) -> None: ...
    def block_removed(self, block: Block) -> None: ...
    def slot_held(self, slot: int, epoch: int) -> None: ...


class Machine(RuleBasedStateMachine):
    """Of two tables that see the same, the one has leases where the other is told of uses: no block can tell them
    apart."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 5.0
        self.tables = [BlockTable(SLOTS, 64, Quiet()) for _ in range(2)]
        for table in self.tables:
            table.attach("a", "test")

    @rule(chain=st.sampled_from("abc"), count=st.integers(1, 4), session=st.sampled_from(["", "s", "t"]))
    def put(self, chain: str, count: int, session: str) -> None:
        self.now += 0.3
        names = keys(count, chain)
        for table in self.tables:
            wanted = [
                Wanted(key, names[at - 1] if at else bytes(32), at, session=session) for at, key in enumerate(names)
            ]
            rooms = table.puts.reserve("a", wanted, self.now)
            mine = [Written(one.block.key, one.block.epoch, b"c" * 16) for one in rooms if one.block]
            table.puts.commit("a", mine, self.now)

    @rule(chain=st.sampled_from("abc"), count=st.integers(1, 4), session=st.sampled_from(["", "s", "t"]))
    def use(self, chain: str, count: int, session: str) -> None:
        self.now += 0.3
        one, other = self.tables
        lease = one.leases.take("a", keys(count, chain), 1.0, self.now, session)
        if lease is not None:
            one.leases.release("a", [lease.lease_id], self.now)
        found = other.touch_all(keys(count, chain), session, self.now)
        assert [block.key for block in found] == ([] if lease is None else [block.key for block in lease.blocks])

    @invariant()
    def same(self) -> None:
        one, other = ({key: table.find(key) for key in list(table.keys())} for table in self.tables)
        assert one.keys() == other.keys()
        for key, block in one.items():
            twin = other[key]
            assert block is not None and twin is not None
            for field in ("used_at", "uses", "session", "counted_at", "pins"):
                assert getattr(block, field) == getattr(twin, field), field


TestTouch = Machine.TestCase
TestTouch.settings = hypothesis_settings(max_examples=60, stateful_step_count=40)


@pytest.mark.parametrize("touched", [False, True])
async def test_what_is_hot_in_workers_stays(touched: bool) -> None:
    """Others fill the store again and again; without a word of its uses it goes."""
    async with open_kvstore(settings(16, eviction="lru")) as store, client_of(store.address) as client:
        await client.put(puts(4), Origin("mine"))
        for number in range(12):
            await client.put(puts(3, f"other {number}"))
            if touched:
                assert await client.touch([("yours", NAMES)]) == []
        assert await client.lookup(NAMES) == (4 if touched else 0)
        if touched:
            assert {store.host.table.find(key).session for key in NAMES} == {"*"}
        assert await client.touch([("mine", keys(2, "never")), ("yours", keys(5))]) == [
            *keys(2, "never"),
            *(keys(5)[4:] if touched else keys(5)),
        ]


async def test_blocks_learn_their_session_and_the_session_is_not_said_to_run() -> None:
    """The router says what sessions do: a touch is late, and would end a wait that has begun since."""
    async with open_kvstore(settings(16)) as store, client_of(store.address) as client:
        await client.put(puts(4))
        store.store.sessions.hint("talk", SessionPhase.USER, store.store.now())
        await client.touch([("talk", NAMES[:3])])
        assert [store.host.table.find(key).session for key in NAMES] == ["talk", "talk", "talk", ""]
        known = store.store.sessions.known("talk")
        assert known is not None and known.state is SessionPhase.USER


async def test_a_promise_is_renewed() -> None:
    async with open_kvstore(settings(16)) as store, client_of(store.address) as client:
        await client.put(puts(2))
        await client.retain(keys(2), 60.0, b"a" * 16)
        before = store.host.table.promised_until(NAMES[0])
        await client.touch([("", keys(2))])
        assert store.host.table.promised_until(NAMES[0]) > before


async def test_blocks_on_the_disk_alone_are_used_there(tmp_path: Path) -> None:
    disk = {"nvme_dir": tmp_path, "nvme_bytes": 1 << 20}
    async with open_kvstore(settings(16, **disk)) as store, client_of(store.address) as client:
        await client.put(puts(4))
        await eventually(lambda: disk_has(store, NAMES) == 4)
        await client.put(puts(16, "b"))
        assert store.host.table.lookup(NAMES) == 0
        assert await client.touch([("talk", NAMES)]) == []
        blocks = [disk_tier(store).find_block(key) for key in NAMES]
        assert {block.session for block in blocks if block is not None} == {"talk"}


@pytest.mark.parametrize(
    ("used", "field"),
    [
        ([{"session": "x" * 65}], "used[0].session"),
        ([{"keys": bytes(32)}, {"keys": bytes(33)}], "used[1].keys"),
        ([{"keys": bytes(32 * (MAX_BATCH + 1))}], "used[0].keys"),
        ([{"keys": bytes(32 * MAX_BATCH)}, {"keys": bytes(32)}], "used"),
    ],
)
async def test_a_bad_touch_is_refused_with_its_field(used: list[dict[str, Any]], field: str) -> None:
    async with open_kvstore(settings()) as store, raw(store.address) as one:
        blocks = [kvstore_pb2.TouchedBlocks(**fields) for fields in used]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.stub.Touch(kvstore_pb2.TouchRequest(attachment_id=await one.attach(), used=blocks))
        code, text = refusal(caught.value)
        assert code == "INVALID_ARGUMENT" and text.startswith(field)


async def test_only_who_is_attached_can_touch() -> None:
    async with open_kvstore(settings()) as store, raw(store.address) as one:
        blocks = [kvstore_pb2.TouchedBlocks(keys=bytes(32))]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.stub.Touch(kvstore_pb2.TouchRequest(attachment_id="nobody", used=blocks))
        assert refusal(caught.value)[0] == "NOT_FOUND"
