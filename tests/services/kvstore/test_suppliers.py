"""Leases whose blocks are not in host memory: brought by a supplier that the test holds in its hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest
from tests.services.kvstore.helpers import (
    BLOCK_BYTES,
    FakeTier,
    Raw,
    client_of,
    eventually,
    join,
    keys,
    puts,
    raw,
    refs,
    settings,
    spec,
)

from penstock.kv.bytes.checksum import checksum
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.kvstore.table.blocks import Block, Lease, ReserveState, TierKind, Wanted
from penstock.kvstore.tiers.base import Room
from penstock.v1 import common_pb2, kvstore_pb2

HOST, NVME = common_pb2.TIER_HOST, common_pb2.TIER_NVME


class Shelf(FakeTier):
    """A supplier with the blocks of chain a. Each bringing reserves at once, and waits for `go` before each block."""

    kind = TierKind.NVME

    def __init__(self, count: int) -> None:
        self.blocks = {put.key: put for put in puts(count)}
        self.go = asyncio.Semaphore(0)
        self.brought: list[int] = []
        self.ended = 0

    def has_blocks(self, names: Sequence[bytes]) -> int:
        return next((at for at, name in enumerate(names) if name not in self.blocks), len(names))

    def find_block(self, key: bytes) -> Block | None:
        put = self.blocks.get(key)
        return Block(key, put.parent, put.first_token, 0, 0, "shelf") if put is not None else None

    def stored_keys(self) -> Iterable[bytes]:
        return self.blocks

    async def bring_blocks(self, names: Sequence[bytes], room: Room, until: float) -> int:
        try:
            self.brought.append(len(names))
            blocks = [self.blocks[name] for name in names]
            answers = [room.reserve(Wanted(put.key, put.parent, put.first_token)) for put in blocks]
            done = 0
            for put, answer in zip(blocks, answers, strict=True):
                await self.go.acquire()
                if answer.block is None:
                    if answer.state is ReserveState.FULL:
                        break
                    continue
                room.view(answer.block)[:] = put.data
                room.commit(answer.block, checksum(put.data))
                done += 1
            return done
        finally:
            self.ended += 1

    def give(self, count: int) -> None:
        for _ in range(count):
            self.go.release()


@asynccontextmanager
async def shelved(count: int, blocks: int = 64, **other: float) -> AsyncIterator[tuple[KvStore, Shelf, Raw]]:
    async with open_kvstore(settings(blocks, **other)) as store, raw(store.address) as one:
        await one.attach()
        shelf = Shelf(count)
        join(store, shelf)
        yield store, shelf, one


async def test_a_lease_brings_what_a_supplier_has() -> None:
    blocks = puts(8)
    async with shelved(6) as (store, shelf, one):
        await one.commit(blocks[:2], (await one.reserve(blocks[:2])).blocks)
        assert await one.lookup(keys(8)) == 6, "a block is findable in whatever tier it is"
        shelf.give(10)
        lease = await one.lease(keys(8))
        assert list(lease.tiers) == [HOST] * 2 + [NVME] * 4
        memory = one.map()
        for put, ref in zip(blocks[2:6], refs(lease)[2:], strict=True):
            assert memory.block(ref.offset, ref.length) == put.data
        again = await one.lease(keys(8))
        assert list(again.tiers) == [HOST] * 6, "they are in host memory now"
        assert shelf.brought == [4], "what host memory has is not brought"
        stats = store.stats()
        assert (stats.puts, stats.brought, stats.hits, stats.misses) == (2, 4, 12, 4)


async def test_the_client_reads_brought_blocks() -> None:
    async with (
        shelved(5) as (store, shelf, _),
        client_of(store.address) as near,
        client_of(store.address, host="x") as far,
    ):
        shelf.give(5)
        async with near.lease(keys(3)) as leased:
            assert leased.tiers == ["nvme"] * 3
            assert [bytes(view) for view in leased.blocks] == [bytes(put.data) for put in puts(3)]
        async with far.lease(keys(5)) as leased:
            assert leased.tiers == ["host"] * 3 + ["nvme"] * 2


async def test_leases_share_one_bringing_and_each_block_is_pinned_for_all() -> None:
    async with shelved(6, bring_s=10) as (store, shelf, one):
        waiting = [asyncio.create_task(one.lease(keys(6))) for _ in range(3)]
        await eventually(lambda: store.stats().leases == 3)
        waiting.append(asyncio.create_task(one.lease(keys(4)[:4])))
        await eventually(lambda: store.stats().leases == 4)
        shelf.give(6)
        answers = await asyncio.gather(*waiting)
        assert [len(answer.epochs) for answer in answers] == [6, 6, 6, 4]
        assert shelf.brought == [6], "once for all"
        assert all(tier == NVME for answer in answers for tier in answer.tiers)
        assert len({epoch for answer in answers for epoch in answer.epochs}) == 6


async def test_a_client_that_hangs_up_leaves_nothing_behind() -> None:
    async with shelved(6, bring_s=10) as (store, shelf, one):
        waiting = asyncio.create_task(one.lease(keys(6)))
        await eventually(lambda: store.stats().reserved == 6)
        waiting.cancel()
        await eventually(lambda: shelf.ended == 1)
        await eventually(lambda: store.stats().leases == 0)
        stats = store.stats()
        assert (stats.reserved, stats.used_bytes, stats.cooling) == (0, 0, 0)


async def test_the_bringing_goes_on_for_those_who_still_wait() -> None:
    async with shelved(6, bring_s=10) as (store, shelf, one):
        first, second = (asyncio.create_task(one.lease(keys(6))) for _ in range(2))
        await eventually(lambda: store.stats().leases == 2)
        first.cancel()
        await eventually(lambda: store.stats().leases == 1)
        shelf.give(6)
        assert len((await second).epochs) == 6
        assert shelf.brought == [6]


async def test_a_attachment_that_ends_during_a_bringing_pins_nothing() -> None:
    async with shelved(4, bring_s=10) as (store, shelf, one):
        waiting = asyncio.create_task(one.lease(keys(4)))
        await eventually(lambda: store.stats().reserved == 4)
        one.calls[0].cancel()
        await eventually(lambda: store.stats().attachments == 0)
        shelf.give(4)
        assert (await waiting).lease_id == 0
        stats = store.stats()
        assert (stats.leases, stats.reserved, stats.blocks) == (0, 0, 4)


async def test_a_slow_supplier_costs_a_bounded_time_and_keeps_what_it_brought() -> None:
    async with shelved(6, bring_s=0.1) as (store, shelf, one):
        shelf.give(2)
        lease = await one.lease(keys(6))
        assert len(lease.epochs) == 2
        await eventually(lambda: store.stats().reserved == 0)
        assert (store.stats().blocks, shelf.ended) == (2, 1)


async def test_a_client_says_how_long_it_waits() -> None:
    async with shelved(6, bring_s=30.0) as (_, shelf, one):
        shelf.give(2)
        request = kvstore_pb2.LeaseRequest(attachment_id=one.attached.attachment_id, keys=keys(6), wait_s=0.05)
        lease = await one.stub.Lease(request)
        assert (len(lease.epochs), lease.more) == (2, True)
        shelf.give(4)
        whole = await one.stub.Lease(
            kvstore_pb2.LeaseRequest(attachment_id=one.attached.attachment_id, keys=keys(6), wait_s=30.0)
        )
        assert (len(whole.epochs), whole.more) == (6, False)


async def test_blocks_found_at_first_are_not_evicted_for_those_that_come() -> None:
    blocks, others = puts(20), puts(14, "b")
    async with shelved(20, blocks=16, bring_s=10) as (store, shelf, one):
        await one.commit(blocks[:2], (await one.reserve(blocks[:2])).blocks)
        await one.commit(others, (await one.reserve(others)).blocks)
        shelf.give(20)
        lease = await one.lease(keys(20))
        assert len(lease.epochs) == 16, "as many as there is room for"
        assert store.stats().evictions == 14
        assert await one.lookup(keys(14, "b")) == 0


async def test_a_failing_supplier_is_a_miss(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(Shelf):
        async def bring_blocks(self, names: Sequence[bytes], room: Room, until: float) -> int:
            room.reserve(Wanted(names[0], bytes(32), 0))
            raise OSError("boom")

    async with open_kvstore(settings()) as store, raw(store.address) as one:
        await one.attach()
        join(store, Broken(2))
        assert (await one.lease(keys(2))).lease_id == 0
        assert (store.stats().reserved, store.stats().leases) == (0, 0)


class Far(Shelf):
    """Waits for `go` before it reserves anything, as one who asks another host first."""

    async def bring_blocks(self, names: Sequence[bytes], room: Room, until: float) -> int:
        await self.go.acquire()
        return await super().bring_blocks(names, room, until)


async def test_a_bringing_for_a_attachment_that_is_over_never_writes_into_another_models_blocks() -> None:
    async with (
        open_kvstore(settings(bring_s=10)) as store,
        raw(store.address) as one,
        raw(store.address) as two,
    ):
        await one.attach()
        shelf = Far(6)
        join(store, shelf)
        before = asyncio.create_task(one.lease(keys(6)))
        await eventually(lambda: store.stats().leases == 1)
        one.calls[0].cancel()
        await eventually(lambda: store.stats().attachments == 0)
        other = spec(BLOCK_BYTES // 2, model="ef" * 32)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await two.attach(other)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, "for now"
        shelf.give(7)
        assert (await before).lease_id == 0
        await eventually(lambda: shelf.ended == 1)
        await two.attach(other)
        assert store.stats().blocks == 0


async def test_a_store_that_stops_ends_its_bringings() -> None:
    async with shelved(4, bring_s=10) as (store, shelf, one):
        waiting = asyncio.create_task(one.lease(keys(4)))
        await eventually(lambda: store.stats().reserved == 4)
    assert shelf.ended == 1
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        answer = await waiting
        assert answer.lease_id == 0
        raise asyncio.CancelledError


async def test_events_name_the_nearest_tier() -> None:
    blocks = puts(4)
    async with shelved(3, blocks=16) as (store, _, one):
        await one.commit(blocks[:1], (await one.reserve(blocks[:1])).blocks)
        call = one.stub.Events(kvstore_pb2.EventsRequest())
        first, second = await call.read(), await call.read()
        assert (first.snapshot, first.tier, list(first.stored)) == (True, HOST, keys(1))
        assert (second.tier, sorted(second.stored)) == (NVME, sorted(keys(3)[1:]))
        epoch = (await one.lease(keys(1))).epochs[0]
        bad = kvstore_pb2.QuarantineRequest(attachment_id=one.attached.attachment_id, key=blocks[0].key, epoch=epoch)
        await one.stub.Quarantine(bad)
        moved = await call.read()
        assert (moved.tier, list(moved.stored), list(moved.removed)) == (NVME, keys(1), [])
        assert store.stats().used_bytes == BLOCK_BYTES, "still leased"
        call.cancel()


class Empty(FakeTier):
    """It seems to have all blocks, and brings none."""

    kind = TierKind.REMOTE

    def __init__(self) -> None:
        self.asked = 0
        self.go = asyncio.Event()

    def has_blocks(self, names: Sequence[bytes]) -> int:
        return len(names)

    async def bring_blocks(self, names: Sequence[bytes], room: Room, until: float) -> int:
        self.asked += 1
        await self.go.wait()
        return 0


async def test_a_lease_asks_its_own_suppliers_where_anothers_had_nothing() -> None:
    """It waits for the other's bringing first; whoever has the same suppliers asks nobody again."""
    async with shelved(0, bring_s=10) as (store, _, one):
        empty, full = Empty(), Shelf(4)
        full.give(4)
        bringer, now = store.store.host.bringer, store.store.now
        table, until = store.store.host.table, now() + 10
        attachment = one.attached.attachment_id

        def lease() -> Lease:
            found = table.leases.take(attachment, keys(4), 60.0, now(), "", grows=True)
            assert found is not None
            return found

        leases = [lease() for _ in range(4)]
        suppliers = ([empty], [empty], [empty, full], [empty, full])
        filling = [
            asyncio.create_task(bringer.fill(own, keys(4), some, until))
            for own, some in zip(leases, suppliers, strict=True)
        ]
        await eventually(lambda: empty.asked == 1)
        empty.go.set()
        await asyncio.gather(*filling)
        assert [len(own.blocks) for own in leases] == [0, 0, 4, 4]
        assert (empty.asked, full.brought) == (2, [4])
