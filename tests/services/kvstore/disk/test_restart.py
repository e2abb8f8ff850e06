"""Stores that end and begin again over the same directory."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.services.kvstore.disk.disks import SLOT, connected, contents, disk, settings, slabs
from tests.services.kvstore.helpers import (
    BLOCK_BYTES,
    ROOT,
    StoreProcess,
    client_of,
    eventually,
    keys,
    puts,
    raw,
    read,
    spec,
)

from penstock.kv.client.client import BlockPut, StoreFault
from penstock.kv.identity import block_keys, namespace, root_key
from penstock.kvstore.service import open_kvstore
from penstock.kvstore.tiers.disk import blocks as blocks_module
from penstock.kvstore.tiers.disk import spaces as spaces_module
from penstock.kvstore.tiers.disk.space import Space
from penstock.runtime.config import ConfigError
from penstock.v1 import common_pb2, kvstore_pb2


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


async def test_many_sessions_with_secrets_page_out_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No session ever sees another's bytes: memory for five of them, a restart in between."""
    monkeypatch.setattr(blocks_module, "_SILENCE_S", 60.0)  # this machine's disk may stand still for a second
    sessions = [f"secret{number}-" for number in range(40)]
    size = {"blocks": 64, "disk_blocks": 600}
    async with open_kvstore(settings(tmp_path, **size)) as store, client_of(store.address) as client:
        for name in sessions:
            assert await client.put(puts(12, name)) == 12
            await eventually(lambda: disk(store).pending == 0)
        assert disk(store).blocks >= 450
    for seed in range(2):
        async with (
            open_kvstore(settings(tmp_path, **size)) as store,
            client_of(store.address, timeout_s=30.0) as client,
        ):
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
