"""Promises to keep blocks: against a naive twin, under a flood, over real sockets."""

from __future__ import annotations

from pathlib import Path

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
    read,
    refusal,
    settings,
)
from tests.services.kvstore.naive import NaiveRetention

from penstock.kv.client.client import Origin
from penstock.kv.eviction.lru import Lru
from penstock.kv.eviction.promised import KeepPromised
from penstock.kvstore.service import open_kvstore
from penstock.kvstore.table.blocks import Block, Wanted, Written
from penstock.kvstore.table.promises import Grant, Promises
from penstock.kvstore.table.table import BlockTable
from penstock.v1 import kvstore_pb2

MOST, TENANT_MOST, LONGEST = 9, 4, 20.0
NAMES = keys(9)
TENANTS = [b"a" * 16, b"b" * 16, b"c" * 16]
ALICE, BOB = TENANTS[:2]


class RetentionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = Promises(MOST, TENANT_MOST, LONGEST)
        self.naive = NaiveRetention(MOST, TENANT_MOST, LONGEST)
        self.now = 5.0

    @rule(seconds=st.sampled_from([0.5, 3.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        tenant=st.sampled_from(TENANTS),
        wanted=st.lists(st.sampled_from(NAMES), max_size=6),
        seconds=st.sampled_from([0.0, 1.0, 5.0, 20.0, 1000.0]),
    )
    def grant(self, tenant: bytes, wanted: list[bytes], seconds: float) -> None:
        expected = self.naive.grant(tenant, wanted, seconds, self.now)
        assert self.table.grant(tenant, wanted, seconds, self.now) == expected

    @rule(used=st.lists(st.sampled_from(NAMES), max_size=6))
    def refresh(self, used: list[bytes]) -> None:
        self.naive.refresh(used, self.now)
        self.table.refresh(used, self.now)

    @invariant()
    def agree(self) -> None:
        self.table.expire(self.now)
        live = self.naive.live(self.now)
        assert len(self.table) == len(live) <= MOST
        for tenant in TENANTS:
            assert self.table.of(tenant) == sum(one[1] == tenant for one in live) <= TENANT_MOST
        ends = {key: end for key, _, _, end in live}
        assert [self.table.until(key) for key in NAMES] == [ends.get(key, 0.0) for key in NAMES]


RetentionMachine.TestCase.settings = hypothesis_settings(max_examples=200, stateful_step_count=40)
TestRetention = RetentionMachine.TestCase


class PolicyMachine(RuleBasedStateMachine):
    """KeepPromised(Lru) against a sort: unpromised blocks by use, then promised ones by the end of their promise."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.tick = 0
        self.blocks = [Block(key, b"", 0, at, at + 1, "s") for at, key in enumerate(NAMES)]
        self.offered: list[Block] = []
        self.policy = KeepPromised(Lru(), lambda: self.now)

    @rule(seconds=st.sampled_from([1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(at=st.integers(0, len(NAMES) - 1), seconds=st.sampled_from([None, 2.0, 7.0]))
    def offer(self, at: int, seconds: float | None) -> None:
        self.tick += 1
        block = self.blocks[at]
        block.used = self.tick
        if seconds is not None:
            block.retained_until = self.now + seconds + at / 100
        self.policy.offer_block(block)
        self.offered = [*(one for one in self.offered if one is not block), block]

    @rule(at=st.integers(0, len(NAMES) - 1))
    def withdraw(self, at: int) -> None:
        self.policy.withdraw_block(self.blocks[at])
        self.offered = [one for one in self.offered if one is not self.blocks[at]]

    @rule()
    def victim(self) -> None:
        def rank(block: Block) -> tuple[float, int]:
            return (block.retained_until, 0) if block.retained_until > self.now else (0.0, block.used)

        expected = min(self.offered, key=rank, default=None)
        assert self.policy.next_victim() is expected
        self.offered = [one for one in self.offered if one is not expected]

    @invariant()
    def agree(self) -> None:
        assert len(self.policy) == len(self.offered)


PolicyMachine.TestCase.settings = hypothesis_settings(max_examples=200, stateful_step_count=40)
TestPolicy = PolicyMachine.TestCase


class Quiet:
    def block_stored(self, block: Block) -> None: ...
    def block_removed(self, block: Block) -> None: ...
    def slot_held(self, slot: int, epoch: int) -> None: ...


class Table:
    """A block table under a clock of its own, and a client that floods it."""

    def __init__(self, slots: int, retention: Promises | None) -> None:
        self.now = 0.0
        self.store = BlockTable(
            slots, 64, Quiet(), policy=lambda: KeepPromised(Lru(), lambda: self.now), promises=retention
        )
        self.store.attach("s", "test")
        self.count = 0

    def put(self, names: list[bytes]) -> None:
        self.now += 0.001
        wanted = [Wanted(key, names[at - 1] if at else bytes(32), at) for at, key in enumerate(names)]
        rooms = self.store.puts.reserve("s", wanted, self.now)
        mine = [Written(one.block.key, one.block.epoch, b"c" * 16) for one in rooms if one.block]
        self.store.puts.commit("s", mine, self.now)

    def flood(self) -> None:
        """Five times what fits, in chains of other prompts."""
        for _ in range(5 * self.store.stats().slots):
            self.count += 1
            self.put(keys(1, f"flood {self.count} "))


def test_promised_blocks_survive_a_flood_that_lru_does_not_and_go_afterwards() -> None:
    for promised in (False, True):
        table = Table(16, Promises(9, 8, 60.0))
        table.put(NAMES[:4])
        if promised:
            assert table.store.promise(NAMES[:4], 10.0, ALICE, table.now) == Grant(10.0, 4)
        table.flood()
        assert table.store.lookup(NAMES) == (4 if promised else 0)
    table.now = 30.0
    table.flood()
    assert table.store.lookup(NAMES) == 0
    assert table.store.stats().retained == 0


def test_a_promise_may_come_before_its_blocks() -> None:
    table = Table(16, Promises(9, 8, 60.0))
    assert table.store.promise(NAMES[:4], 10.0, ALICE, table.now).blocks == 4
    table.put(NAMES[:4])
    table.flood()
    assert table.store.lookup(NAMES) == 4


def test_a_hit_renews_the_promise() -> None:
    table = Table(16, Promises(9, 8, 60.0))
    table.put(NAMES[:4])
    table.store.promise(NAMES[:4], 10.0, ALICE, table.now)
    for _ in range(4):
        table.now += 8.0
        lease = table.store.leases.take("s", NAMES[:4], 1.0, table.now)
        assert lease is not None
        table.store.leases.release("s", [lease.lease_id], table.now)
        table.flood()
        assert table.store.lookup(NAMES) == 4


def test_a_store_full_of_promises_still_takes_what_is_new() -> None:
    table = Table(4, Promises(8, 4, 60.0))
    table.put(NAMES[:4])
    assert table.store.promise(NAMES[:4], 10.0, ALICE, table.now).blocks == 4
    table.put(keys(1, "new"))
    assert table.store.lookup(keys(1, "new")) == 1
    assert table.store.lookup(NAMES) == 3


async def test_over_the_wire_and_no_tenant_crowds_out_another() -> None:
    """64 slots: 16 may be promised, 8 to one tenant, and to each no more than it leaves for others."""
    alices, bobs = puts(12, "alice"), puts(6, "bob")
    config = settings(64)
    async with open_kvstore(config) as store, client_of(store.address) as client:
        for blocks, tenant in ((alices, ALICE), (bobs, BOB)):
            await client.put(blocks, Origin("talk", tenant))
        assert await client.retain([one.key for one in alices], 600.0, ALICE) == (600.0, 8)
        assert await client.retain([one.key for one in puts(4, "more of alice")], 600.0, ALICE) == (0.0, 0)
        assert await client.retain([one.key for one in bobs], 1e6, BOB) == (3600.0, 4)
        for late in range(3):
            granted = await client.retain([one.key for one in puts(4, f"late {late}")], 60.0, bytes([late]) * 16)
            assert granted == (60.0, (2, 1, 1)[late]), "who comes late gets something, too"
        for number in range(40):
            await client.put(puts(8, f"flood {number}"))
        assert await client.lookup([one.key for one in alices]) == 8
        assert await client.lookup([one.key for one in bobs]) == 4
        assert (await read(client, [bobs[3].key]))[0] == bytes(bobs[3].data)
        assert store.stats().retained == 16


async def test_a_promise_to_nobody_or_to_a_stranger_is_refused() -> None:
    async with open_kvstore(settings()) as store, raw(store.address) as client:
        attachment = await client.attach()
        for code, wrong in (
            ("INVALID_ARGUMENT", {"namespace": b""}),
            ("INVALID_ARGUMENT", {"namespace": b"short"}),
            ("INVALID_ARGUMENT", {"ttl_s": float("nan")}),
            ("INVALID_ARGUMENT", {"ttl_s": -1.0}),
            ("INVALID_ARGUMENT", {"keys": [b"no key"]}),
            ("NOT_FOUND", {"attachment_id": "guessed"}),
        ):
            given = {"attachment_id": attachment, "keys": NAMES, "ttl_s": 5.0, "namespace": ALICE} | wrong
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.stub.Retain(kvstore_pb2.RetainRequest(**given))
            assert refusal(caught.value)[0] == code
        assert store.stats().retained == 0


async def test_promised_blocks_stay_on_the_disk_when_it_floods(tmp_path: Path) -> None:
    """More than the host tier may promise: the disk keeps them all, and others' blocks come and go there."""
    kept, lost = puts(40, "kept"), puts(40, "lost")
    config = settings(64, nvme_dir=tmp_path, nvme_bytes=2 << 20)
    async with open_kvstore(config) as store, client_of(store.address) as client:
        disk = store.disk
        assert disk is not None
        await eventually(lambda: disk.figures()["slots"])
        count = disk.figures()["slots"] // 8
        assert 64 // 8 < count < len(kept)
        await client.put(kept, Origin("", ALICE))
        assert await client.retain([one.key for one in kept], 600.0, ALICE) == (600.0, count)
        await eventually(lambda: disk_has(store, [one.key for one in kept]) == len(kept))
        await client.put(lost, Origin("", ALICE))
        number = 0
        while disk.figures()["evictions"] < 2 * disk.figures()["slots"]:
            number += 1
            await client.put(puts(32, f"flood {number}"))
            await eventually(lambda: not disk.figures()["pending"])
        assert await client.lookup([one.key for one in lost]) == 0
        assert await client.lookup([one.key for one in kept]) == count
        fetched = await client.fetch([one.key for one in kept], buffers(count))
        assert (len(fetched), fetched[-1]) == (count, "nvme")


async def test_a_promise_of_the_disk_outlives_the_process(tmp_path: Path) -> None:
    """With what is left of it, not anew."""
    kept = puts(8, "kept")
    config = settings(64, nvme_dir=tmp_path, nvme_bytes=2 << 20)
    async with open_kvstore(config) as store, client_of(store.address) as client:
        await eventually(lambda: store.disk.figures()["slots"])
        assert (await client.retain([one.key for one in kept[:5]], 600.0, ALICE))[1] == 5
        await client.put(kept, Origin("", ALICE))
        await eventually(lambda: disk_has(store, [one.key for one in kept]) == 8)
    async with open_kvstore(config) as store, client_of(store.address) as client:
        await eventually(lambda: store.disk.figures()["slots"])
        table, now = disk_tier(store)._blocks.table, store.store.now()
        assert [table.promised_until(one.key) > now for one in kept] == [True] * 5 + [False] * 3
        assert all(now + 500 < table.find(one.key).retained_until <= now + 600 for one in kept[:5])


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(4096)) for _ in range(count)]
