"""Stores that end and begin again over the same directory."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.services.kvstore.disk.disks import SLOT, FaultyFiles, contents, settings, slabs
from tests.services.kvstore.helpers import (
    BLOCK_BYTES,
    ROOT,
    FakeTier,
    StoreProcess,
    client_of,
    eventually,
    join,
    keys,
    puts,
    raw,
    read,
    spec,
)

from penstock.kv.client.client import BlockPut, StoreClient, StoreFault
from penstock.kv.client.origin import Origin
from penstock.kv.identity import block_keys, namespace, root_key
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.kvstore.sessions import SessionPhase
from penstock.kvstore.table.blocks import TierKind
from penstock.kvstore.tiers.base import Room
from penstock.kvstore.tiers.disk import spaces as spaces_module
from penstock.kvstore.tiers.disk.format import PAGE
from penstock.kvstore.tiers.disk.space import Space
from penstock.runtime.config import ConfigError
from penstock.v1 import common_pb2, kvstore_pb2


def disk(store: KvStore) -> kvstore_pb2.NvmeStats:
    """The figures of the disk tier."""
    assert store.disk is not None
    return kvstore_pb2.NvmeStats(**store.disk.figures())


async def connected(client: StoreClient) -> None:
    await eventually(lambda: client.connected)


async def test_an_ordered_stop_keeps_one_finished_turn(tmp_path: Path) -> None:
    """A laptop: one turn, then the lid closes. Default settings."""
    async with open_kvstore(settings(tmp_path)) as store, client_of(store.address) as client:
        assert await client.put(puts(20)) == 20
    async with open_kvstore(settings(tmp_path)) as store, raw(store.address) as one:
        assert await one.lookup(keys(20)) == 20, "before the first client"
        call = one.stub.Events(kvstore_pb2.EventsRequest())
        first = await call.read()
        assert (first.snapshot, first.tier, set(first.stored)) == (True, common_pb2.TIER_NVME, set(keys(20)))
        call.cancel()
        async with client_of(store.address) as client, client_of(store.address, host="elsewhere") as far:
            assert await read(client, keys(20), "nvme") == list(contents(20).values())
            assert await read(client, keys(20)) == list(contents(20).values())
            assert await read(far, keys(20)) == list(contents(20).values())
        stats = disk(store)
        assert (stats.blocks, stats.read_blocks, stats.written_blocks) == (20, 20, 0)
        wire = await one.stats()
        assert wire.nvme == disk(store)
        assert wire.brought == 20


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


@pytest.mark.mesh
async def test_a_killed_store_keeps_what_it_had_written(tmp_path: Path) -> None:
    store = StoreProcess(1 << 20, "--nvme-dir", str(tmp_path), "--nvme-bytes", "16MiB")
    try:
        async with raw(store.address) as one, client_of(store.address) as client:
            for life in range(4):
                await connected(client)
                for before in range(life):
                    copies = await read(client, keys(30, f"s{before}-"), "nvme")
                    assert copies == list(contents(30, f"s{before}-").values())
                assert await client.put(puts(30, f"s{life}-")) == 30
                await one.settle(lambda stats, life=life: stats.nvme.blocks == 30 * (life + 1))  # type: ignore[misc]
                store.kill()
                await eventually(lambda: not client.connected)
                store.restart()
    finally:
        store.close()


@pytest.mark.mesh
async def test_killed_at_random_moments_under_load(tmp_path: Path) -> None:
    """Whatever a lease gives is right, in every life of the store."""
    store = StoreProcess(1 << 18, "--nvme-dir", str(tmp_path), "--nvme-bytes", "2MiB")
    source, served = random.Random(4), 0
    try:
        async with client_of(store.address, timeout_s=5) as client:
            for _ in range(8):
                await connected(client)
                killing = asyncio.get_running_loop().call_later(source.uniform(0.05, 0.4), store.kill)
                try:
                    while True:
                        chain = f"r{source.randrange(12)}-"
                        await client.put(puts(25, chain))
                        async with client.lease(keys(25, chain := f"r{source.randrange(12)}-")) as leased:
                            right = list(contents(25, chain).values())
                            assert [bytes(view) for view in leased.blocks] == right[: len(leased.blocks)]
                            served += len(leased.blocks)
                except StoreFault:
                    pass
                finally:
                    killing.cancel()
                store.restart()
    finally:
        store.close()
    assert served > 100


async def test_many_sessions_with_secrets_page_out_and_back(tmp_path: Path) -> None:
    """No session ever sees another's bytes: memory for five of them, a restart in between."""
    sessions = [f"secret{number}-" for number in range(40)]
    size = {"blocks": 64, "disk_blocks": 600}
    async with open_kvstore(settings(tmp_path, **size)) as store, client_of(store.address) as client:
        for name in sessions:
            assert await client.put(puts(12, name)) == 12
            await eventually(lambda: disk(store).pending == 0)
        assert disk(store).blocks >= 450
    for seed in range(2):
        async with open_kvstore(settings(tmp_path, **size)) as store, client_of(store.address) as client:
            await connected(client)
            order = sessions.copy()
            random.Random(seed).shuffle(order)
            whole = 0

            async def turn(name: str) -> int:
                async with client.lease(keys(12, name)) as leased:
                    copies = [bytes(view) for view in leased.blocks]
                    assert leased.still_valid()
                assert copies == list(contents(12, name).values())[: len(copies)]
                return len(copies) == 12

            for at in range(0, len(order), 2):
                whole += sum(await asyncio.gather(*(turn(name) for name in order[at : at + 2])))
            assert whole == len(sessions)
            assert disk(store).corrupt == 0


async def test_one_tenants_blocks_are_a_miss_for_another_in_this_tier_too(tmp_path: Path) -> None:
    tokens = list(range(160))
    names = {
        tenant: block_keys(root_key(spec(), namespace(b"server", tenant)), tokens, spec().block_size) for tenant in "ab"
    }
    data = [memoryview(random.Random(number).randbytes(BLOCK_BYTES)) for number in range(10)]
    mine = [BlockPut(key, names["a"][at - 1] if at else ROOT, at * 16, data[at]) for at, key in enumerate(names["a"])]
    async with open_kvstore(settings(tmp_path)) as store, client_of(store.address) as client:
        await client.put(mine)
    async with open_kvstore(settings(tmp_path)) as store, client_of(store.address) as client:
        await connected(client)
        assert await client.lookup(names["b"]) == 0
        assert await read(client, names["b"], "nvme") == []
        assert await read(client, names["a"], "nvme") == [bytes(one) for one in data]


async def test_a_corrupt_block_is_counted_and_computed_again(tmp_path: Path) -> None:
    async with open_kvstore(settings(tmp_path)) as store, client_of(store.address) as client:
        await client.put(puts(6))
    with slabs(tmp_path)[0].open("r+b") as file:
        file.seek(3 * SLOT + 4096 + 5)
        file.write(b"\xff\x00\xff")
    async with open_kvstore(settings(tmp_path)) as store, client_of(store.address) as client:
        await connected(client)
        assert await read(client, keys(6), "nvme") == list(contents(6).values())[:3]
        assert disk(store).corrupt == 1
        assert await client.lookup(keys(6)) == 3
        assert await client.put(puts(6)) == 3, "the caller stores what it had to compute"
        assert await read(client, keys(6)) == list(contents(6).values())
        await eventually(lambda: disk(store).blocks == 6)


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


async def test_a_store_that_may_not_have_its_directory_leaves_nothing_behind(tmp_path: Path) -> None:
    async with open_kvstore(settings(tmp_path)):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(ConfigError, match="another store uses it"):
                async with open_kvstore(settings(tmp_path)):
                    raise AssertionError
        assert len(os.listdir("/proc/self/fd")) == before


async def test_the_index_is_made_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_in: list[threading.Thread] = []

    class Seen(Space):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            made_in.append(threading.current_thread())
            super().__init__(*arguments, **more)

    monkeypatch.setattr(spaces_module, "Space", Seen)
    async with open_kvstore(settings(tmp_path)) as store, client_of(store.address) as client:
        await client.put(puts(20))
    async with open_kvstore(settings(tmp_path)) as store, client_of(store.address) as client:
        assert await read(client, keys(20), "nvme") == list(contents(20).values())
    assert len(made_in) == 2
    assert threading.main_thread() not in made_in


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


async def test_another_model_meets_none_of_the_old_blocks_and_they_outlive_it(tmp_path: Path) -> None:
    other = spec(model="99" * 32)
    async with open_kvstore(settings(tmp_path, disk_blocks=2048)) as store:
        async with client_of(store.address) as client:
            await client.put(puts(5))
            await eventually(lambda: disk(store).blocks == 5)
        await eventually(lambda: store.stats().attachments == 0)
        async with client_of(store.address, other) as client:
            await connected(client)
            assert await client.lookup(keys(5)) == 0
            await client.put(puts(3, "other"))
            await eventually(lambda: disk(store).blocks == 3)
    async with open_kvstore(settings(tmp_path, disk_blocks=2048)) as store:
        async with client_of(store.address) as client:
            await connected(client)
            await eventually(lambda: disk(store).blocks == 5)
            assert await client.lookup(keys(3, "other")) == 0
            assert await read(client, keys(5), "nvme") == list(contents(5).values())


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
