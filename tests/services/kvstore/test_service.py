"""The store over real sockets, driven by a client that minds no rules."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs
from tests.services.kvstore.helpers import (
    BLOCK_BYTES,
    eventually,
    keys,
    puts,
    raw,
    refusal,
    settings,
    spec,
)

from penstock.kvstore.service import open_kvstore
from penstock.kvstore.table import puts as puts_module
from penstock.kvstore.tiers import host as host_module
from penstock.kvstore.tiers.host import HostTier
from penstock.v1 import kvstore_pb2

WRITE = kvstore_pb2.Reservation.STATE_WRITE
EXISTS = kvstore_pb2.Reservation.STATE_EXISTS
FULL = kvstore_pb2.Reservation.STATE_FULL


async def refused(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return refusal(caught.value)


async def test_a_reserved_block_is_never_found() -> None:
    blocks, names = puts(3), keys(3)
    async with open_kvstore(settings()) as store, raw(store.address) as one, raw(store.address) as two:
        await one.attach()
        await two.attach()
        rooms = (await one.reserve(blocks)).blocks
        assert [room.state for room in rooms] == [WRITE] * 3
        assert await two.lookup(names) == 0
        assert (await two.lease(names)).lease_id == 0
        assert [room.state for room in (await two.reserve(blocks)).blocks] == [EXISTS] * 3
        assert await one.commit(blocks[:2], rooms[:2]) == [True, True]
        assert await two.lookup(names) == 2
        assert len((await two.lease(names)).epochs) == 2


async def test_only_the_owner_commits_and_only_once() -> None:
    blocks = puts(1)
    async with open_kvstore(settings()) as store, raw(store.address) as one, raw(store.address) as two:
        await one.attach()
        await two.attach()
        rooms = (await one.reserve(blocks)).blocks
        assert await two.commit(blocks, rooms) == [False]
        assert await one.commit(blocks, rooms) == [True]
        assert await one.commit(blocks, rooms) == [False]
        assert store.stats().refused_commits == 2


async def test_a_late_commit_is_refused_and_its_slot_rests() -> None:
    blocks = puts(1)
    async with open_kvstore(settings(reserve_s=0.02, cooling_s=60)) as store, raw(store.address) as one:
        await one.attach()
        memory = one.map()
        rooms = (await one.reserve(blocks)).blocks
        assert memory.holds(rooms[0].offset, rooms[0].epoch)
        await eventually(lambda: store.stats().reserved == 0)
        assert not memory.holds(rooms[0].offset, rooms[0].epoch)
        assert await one.commit(blocks, rooms) == [False]
        stats = store.stats()
        assert (stats.expired_reservations, stats.refused_commits, stats.cooling, stats.used_bytes) == (1, 1, 1, 0)
        again = (await one.reserve(blocks)).blocks
        assert again[0].state == WRITE
        assert again[0].offset != rooms[0].offset, "the late writer's slot is not reused yet"
        assert await one.commit(blocks, rooms) == [False], "the old epoch does not commit the new reservation"


async def test_leased_blocks_are_not_evicted_and_a_full_store_says_so() -> None:
    blocks, more = puts(16), puts(4, "b")
    async with open_kvstore(settings(16)) as store, raw(store.address) as one:
        await one.attach()
        assert all(await one.commit(blocks, (await one.reserve(blocks)).blocks))
        lease = await one.lease(keys(16))
        assert [room.state for room in (await one.reserve(more)).blocks] == [FULL] * 4
        released = await one.stub.Release(
            kvstore_pb2.ReleaseRequest(attachment_id=one.attached.attachment_id, lease_ids=[lease.lease_id, 99])
        )
        assert list(released.released) == [True, False]
        assert [room.state for room in (await one.reserve(more)).blocks] == [WRITE] * 4
        assert store.stats().evictions == 4
        assert await one.lookup(keys(16)) == 12, "the deepest went first, the prefix is whole"


async def test_a_lease_ends_at_its_deadline() -> None:
    blocks = puts(1)
    async with open_kvstore(settings()) as store, raw(store.address) as one:
        await one.attach()
        await one.commit(blocks, (await one.reserve(blocks)).blocks)
        lease = await one.lease(keys(1), seconds=0.02)
        await eventually(lambda: store.stats().leases == 0)
        assert store.stats().expired_leases == 1
        request = kvstore_pb2.ReadRequest(
            attachment_id=one.attached.attachment_id, lease_id=lease.lease_id, indices=[0]
        )
        assert (await refused(one.stub.Read(request).read()))[0] == "NOT_FOUND"


async def test_the_end_of_a_attachment_returns_everything() -> None:
    blocks = puts(4)
    async with open_kvstore(settings()) as store, raw(store.address) as one:
        baseline = store.stats()
        await one.attach()
        await one.commit(blocks[:2], (await one.reserve(blocks[:2])).blocks)
        await one.lease(keys(2))
        await one.reserve(blocks[2:])
        stats = store.stats()
        assert (stats.leases, stats.reserved, stats.attachments) == (1, 2, 1)
        one.calls[0].cancel()
        await eventually(lambda: store.stats().attachments == baseline.attachments)
        await eventually(lambda: store.stats().cooling == 0)
        stats = store.stats()
        assert (stats.leases, stats.reserved, stats.used_bytes) == (0, 0, 2 * BLOCK_BYTES)
        assert (await refused(one.lease(keys(1))))[0] == "NOT_FOUND"


async def test_quarantine_takes_a_block_out_even_while_it_is_leased() -> None:
    blocks = puts(2)
    async with open_kvstore(settings()) as store, raw(store.address) as one:
        attachment = await one.attach()
        await one.commit(blocks, (await one.reserve(blocks)).blocks)
        lease = await one.lease(keys(2))
        bad = kvstore_pb2.QuarantineRequest(attachment_id=attachment, key=blocks[0].key, epoch=lease.epochs[0])
        assert (await one.stub.Quarantine(bad)).removed
        assert not (await one.stub.Quarantine(bad)).removed
        assert await one.lookup(keys(2)) == 0
        stats = store.stats()
        assert (stats.detached, stats.quarantined, stats.used_bytes) == (1, 1, 2 * BLOCK_BYTES)
        await one.stub.Release(kvstore_pb2.ReleaseRequest(attachment_id=attachment, lease_ids=[lease.lease_id]))
        stats = store.stats()
        assert (stats.detached, stats.cooling, stats.used_bytes) == (0, 1, BLOCK_BYTES)


async def test_another_spec_is_refused_with_the_difference() -> None:
    async with open_kvstore(settings()) as store, raw(store.address) as one, raw(store.address) as two:
        await one.attach()
        for other, word in (
            (spec(dtype="bfloat16"), "dtype is 'float32' here and 'bfloat16' there"),
            (spec(model="ef" * 32), "model is"),
            (spec(block_bytes=8192), "block_bytes is 4096 here and 8192 there"),
        ):
            code, text = await refused(two.attach(other))
            assert code == "FAILED_PRECONDITION"
            assert word in text
        code, text = await refused(two.attach(spec(block_bytes=1 << 29)))
        assert (code, text) == ("FAILED_PRECONDITION", "a block of 512MiB does not fit into a store of 270848B")


async def test_a_new_spec_empties_a_store_that_nobody_uses() -> None:
    blocks = puts(2)
    async with open_kvstore(settings()) as store, raw(store.address) as one, raw(store.address) as two:
        await one.attach()
        await one.commit(blocks, (await one.reserve(blocks)).blocks)
        one.calls[0].cancel()
        await eventually(lambda: store.stats().attachments == 0)
        await two.attach(spec(dtype="bfloat16"))
        assert await two.lookup(keys(2)) == 0
        assert store.stats().used_bytes == 0
        assert (await two.stats()).spec.dtype == "bfloat16"


async def test_too_many_clients_are_turned_away() -> None:
    async with open_kvstore(settings(max_clients=1)) as store, raw(store.address) as one:
        await one.attach()
        assert (await refused(one.attach()))[0] == "RESOURCE_EXHAUSTED"


async def test_who_reserves_and_writes_nothing_pushes_out_a_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of all blocks; the others stay where they are."""
    monkeypatch.setattr(puts_module, "_ANY", 64)  # the store is a small one
    kept, flood = puts(512), puts(400, chain="flood")
    async with open_kvstore(settings(blocks=512)) as store, raw(store.address) as one, raw(store.address) as other:
        await one.attach()
        for begin in range(0, 512, 64):
            part = kept[begin : begin + 64]
            await one.commit(part, (await one.reserve(part)).blocks)
        await other.attach()
        answers = (await other.reserve(flood)).blocks
        states = [answer.state for answer in answers]
        assert states == [kvstore_pb2.Reservation.STATE_WRITE] * 128 + [kvstore_pb2.Reservation.STATE_FULL] * 272
        assert await one.lookup([block.key for block in kept]) == 512 - 128
        await other.commit(flood[:64], answers[:64])
        more = puts(200, chain="more")
        states = [answer.state for answer in (await other.reserve(more)).blocks]
        assert states.count(kvstore_pb2.Reservation.STATE_WRITE) == 64, "what is written counts no more"


async def test_a_few_may_listen_to_events() -> None:
    async with open_kvstore(settings()) as store, raw(store.address) as one:
        await one.attach()
        heard = [one.stub.Events(kvstore_pb2.EventsRequest()) for _ in range(16)]
        for call in heard:
            await call.read()
        assert (await refused(one.stub.Events(kvstore_pb2.EventsRequest()).read()))[0] == "RESOURCE_EXHAUSTED"
        assert await one.lookup([]) == 0
        heard[0].cancel()
        async with asyncio.timeout(5):
            while True:
                try:
                    await one.stub.Events(kvstore_pb2.EventsRequest()).read()
                    break
                except grpc.aio.AioRpcError:
                    pass
        for call in heard:
            call.cancel()


async def test_stats_on_the_wire_are_the_tables() -> None:
    blocks = puts(3)
    async with open_kvstore(settings()) as store, raw(store.address) as one:
        assert (await one.stats()).slots == 0
        await one.attach()
        await one.commit(blocks, (await one.reserve(blocks)).blocks)
        await one.lease(keys(5))
        wire, own = await one.stats(), store.stats()
        for name in own.__slots__:
            assert getattr(wire, name) == getattr(own, name), name
        assert (wire.hits, wire.misses, wire.puts, wire.blocks) == (3, 2, 3, 3)


async def test_a_part_that_fails_is_told_at_once_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(host: HostTier, thread: Executor) -> None:
        raise OSError("boom")

    monkeypatch.setattr(host_module, "provide_pages", fail)
    with capture_logs() as logs:
        async with open_kvstore(settings()) as store, raw(store.address) as one:
            await one.attach()
            assert await one.lookup(keys(1)) == 0
            told = [line for line in logs if line["log_level"] == "error"]  # one each time that it was started
            assert {(line["task"], str(line["exc_info"])) for line in told} == {("kvstore pages", "boom")}
            assert b'penstock_task_failures_total{task="kvstore pages"}' in store.metrics.text()


async def test_two_stores_in_one_process() -> None:
    blocks = puts(1)
    async with (
        open_kvstore(settings()) as a,
        open_kvstore(settings()) as b,
        raw(a.address) as one,
        raw(b.address) as two,
    ):
        await one.attach()
        await two.attach()
        await one.commit(blocks, (await one.reserve(blocks)).blocks)
        assert (await one.lookup(keys(1)), await two.lookup(keys(1))) == (1, 0)


async def test_a_store_that_only_ever_misses_says_so_once(monkeypatch) -> None:
    monkeypatch.setattr("penstock.kvstore.store._FRUITLESS", 6)
    with capture_logs() as logs:
        async with open_kvstore(settings()) as store, raw(store.address) as client:
            await client.attach()
            blocks = puts(6)
            await client.commit(blocks, (await client.reserve(blocks)).blocks)
            told = [len([one for one in logs if "none was ever found" in one["event"]])]
            for asked in (keys(5, "b"), keys(1, "c"), keys(3, "d")):
                await client.lease(asked)
                told.append(len([one for one in logs if "none was ever found" in one["event"]]))
    assert told == [0, 0, 1, 1]
