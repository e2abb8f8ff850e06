"""A store with a disk while it runs: what goes to the disk and comes back, and what a bad disk costs."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.services.kvstore.disk.disks import FaultyFiles, connected, contents, disk, settings
from tests.services.kvstore.helpers import (
    FakeTier,
    client_of,
    eventually,
    join,
    keys,
    puts,
    raw,
    read,
)

from penstock.kv.client.origin import Origin
from penstock.kvstore.service import open_kvstore
from penstock.kvstore.sessions import SessionPhase
from penstock.kvstore.table.blocks import TierKind
from penstock.kvstore.tiers.base import Room
from penstock.kvstore.tiers.disk import spaces as spaces_module
from penstock.kvstore.tiers.disk.format import PAGE
from penstock.v1 import common_pb2, kvstore_pb2


async def test_a_router_hears_where_blocks_are(tmp_path: Path) -> None:
    async with (
        open_kvstore(settings(tmp_path, 16)) as store,
        raw(store.address) as one,
        client_of(store.address) as client,
    ):
        call = one.stub.Events(kvstore_pb2.EventsRequest())
        await call.read()
        known: dict[bytes, int] = {}

        async def until(count: int, tier: int) -> None:
            async with asyncio.timeout(15):
                while list(known.values()).count(tier) != count:
                    event = await call.read()
                    known.update(dict.fromkeys(event.stored, event.tier))
                    for key in event.removed:
                        del known[key]

        await client.put(puts(16))
        await eventually(lambda: disk(store).blocks == 16)
        await until(16, common_pb2.TIER_HOST)
        await client.put(puts(10, "b"))
        await until(10, common_pb2.TIER_NVME)
        await eventually(lambda: disk(store).blocks == 26)
        assert await client.lookup(keys(16)) == 16, "evicted from memory, but not gone"
        async with client.lease(keys(16)) as leased:
            assert leased.tiers == ["host"] * 6 + ["nvme"] * 10
        call.cancel()


async def test_a_full_disk_is_seen_and_serving_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = FaultyFiles()
    files.write_error = errno.ENOSPC
    monkeypatch.setattr(spaces_module, "Files", lambda: files)
    async with open_kvstore(settings(tmp_path)) as store, client_of(store.address) as client, raw(store.address) as one:
        await connected(client)
        await client.put(puts(20))
        await eventually(lambda: disk(store).write_failures > 0)
        stats = (await one.stats()).nvme
        assert (stats.writing, stats.pending, stats.blocks) == (0, 20, 0)
        assert b"penstock_store_nvme_writing 0.0" in store.metrics.text()
        assert await read(client, keys(20)) == list(contents(20).values())
        files.write_error = 0
        await eventually(lambda: disk(store).blocks == 20)
        assert disk(store).writing == 1


async def test_a_disk_that_rests_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listeners are told where blocks are, not whether the disk is tried at this moment."""
    files = FaultyFiles()
    monkeypatch.setattr(spaces_module, "Files", lambda: files)
    async with open_kvstore(settings(tmp_path, 16)) as store, client_of(store.address) as client:
        await connected(client)
        await client.put(puts(16))
        await eventually(lambda: disk(store).blocks == 16)
        await client.put(puts(8, "b"))
        await eventually(lambda: disk(store).blocks == 24)
        files.read_error = errno.EIO
        async with client.lease(keys(16)) as leased:
            assert len(leased.blocks) == 8
        assert disk(store).reading == 0
        await eventually(lambda: store.stats().leases == 0)
        await client.put(puts(16, "c"))
        with store.store.tiers.hub.subscribe() as listener:
            known: dict[bytes, TierKind] = {}
            while len(known) < len(set(store.store.tiers.keys())):
                change = await listener.next()
                assert change is not None
                known.update(dict.fromkeys(change.stored, change.tier))
        assert {*keys(8, "b"), *keys(16)} - set(known) == {keys(16)[8]}, "all but the one that could not be read"
        assert list(known.values()).count(TierKind.NVME) >= 20


async def test_a_disk_that_hangs_costs_one_lease_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_kvstore(settings(tmp_path)) as store, client_of(store.address) as client:
        await client.put(puts(20))

    class Hanging(FaultyFiles):
        def __init__(self) -> None:
            super().__init__()
            self.go = threading.Event()

        def read(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
            if sum(buffer.nbytes for buffer in buffers) > PAGE:  # a block, not a header
                self.go.wait(30)
            return super().read(fd, buffers, at)

    files = Hanging()
    monkeypatch.setattr(spaces_module, "Files", lambda: files)
    async with open_kvstore(settings(tmp_path, bring_s=0.6)) as store, raw(store.address) as one:
        await one.attach()
        assert await one.lookup(keys(20)) == 20
        lease = asyncio.create_task(one.lease(keys(20)))
        await eventually(lambda: store.stats().reserved)
        assert (await lease).lease_id == 0
        files.go.set()
        await eventually(lambda: store.stats().reserved == 0)
        assert (disk(store).reading, disk(store).read_failures) == (0, 1)
        assert await one.lookup(keys(20)) == 0, "it is not asked for a while"


async def test_what_may_not_be_written_any_more_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        config = settings(tmp_path, nvme_flush_s=600, nvme_write_bytes_per_day=1 << 20)
        async with open_kvstore(config) as store, client_of(store.address) as client:
            await connected(client)
            assert store.disk is not None
            store.disk.condition.budget.spend(1 << 20, time.time())
            await client.put(puts(20))
            assert disk(store).pending == 20


async def test_blocks_go_to_the_disk_also_when_there_is_always_a_lease_that_waits(tmp_path: Path) -> None:
    async with open_kvstore(settings(tmp_path, bring_s=60)) as store, client_of(store.address) as client:
        await connected(client)
        waiting = asyncio.Event()

        class Never(FakeTier):
            """A supplier, perhaps another host, that takes its time."""

            kind = TierKind.REMOTE

            def has_blocks(self, names: Sequence[bytes]) -> int:
                return len(names) if names[0] == keys(1, "far")[0] else 0

            def stored_keys(self) -> Sequence[bytes]:
                return ()

            def find_block(self, key: bytes) -> None:
                return None

            async def bring_blocks(self, names: Sequence[bytes], room: Room, until: float) -> int:
                waiting.set()
                await asyncio.Event().wait()
                return 0

        join(store, Never())
        async with raw(store.address) as one:
            await one.attach()
            lease = asyncio.create_task(one.lease(keys(1, "far")))
            await waiting.wait()
            await client.put(puts(20))
            await eventually(lambda: disk(store).blocks == 20)
            assert not lease.done()
            lease.cancel()


async def test_blocks_are_back_before_their_session_is(tmp_path: Path) -> None:
    async with open_kvstore(settings(tmp_path, 24)) as store, client_of(store.address) as client:
        await connected(client)
        await client.put(puts(12))
        async with client.lease(keys(12), Origin(session="c")) as leased:
            assert len(leased.blocks) == 12
        await eventually(lambda: disk(store).blocks == 12)
        await client.put(puts(24, "others"))
        assert store.stats().blocks == 24
        await eventually(lambda: store.host.table.lookup(keys(12)) == 0)
        store.store.sessions.hint("c", SessionPhase.TOOL, store.store.now(), returns_in=0.5)
        await eventually(lambda: store.host.table.lookup(keys(6)) == 6)
        assert disk(store).prefetched == 1
        assert store.stats().leases == 0


async def test_a_stop_is_bounded_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = FaultyFiles()
    files.write_error = errno.EIO
    monkeypatch.setattr(spaces_module, "Files", lambda: files)
    async with asyncio.timeout(10):
        async with open_kvstore(settings(tmp_path, nvme_flush_s=0.2)) as store, client_of(store.address) as client:
            await client.put(puts(20))
