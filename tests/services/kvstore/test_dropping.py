"""A tenant's blocks are dropped on an operator's wish: from all tiers, not those of others, not under a reader."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.services.kvstore.disk.disks import settings as disk_settings
from tests.services.kvstore.helpers import (
    BLOCK_BYTES,
    FakeTier,
    client_of,
    disk_has,
    eventually,
    join,
    keys,
    puts,
    raw,
    read,
    settings,
)

from penstock.kv.client.client import BlockPut, Origin
from penstock.kvstore.service import open_kvstore
from penstock.kvstore.table.blocks import TierKind, Wanted, Written
from penstock.kvstore.tiers.base import Dropped

MINE, THEIRS = Origin(namespace=b"m" * 16), Origin(namespace=b"t" * 16)


async def test_blocks_of_others_stay_and_readers_keep_theirs() -> None:
    """A lease outlives the drop: its bytes stay in place, its slots are free when it ends."""
    mine, theirs = puts(6), puts(5, "b")
    async with open_kvstore(settings()) as store, client_of(store.address) as client, raw(store.address) as one:
        assert await client.put(mine, MINE) == 6 and await client.put(theirs, THEIRS) == 5
        async with client.lease(keys(2)) as leased:
            [dropped] = await store.partitions.drop_tenant(MINE.namespace)
            assert (dropped.kind, dropped.blocks, dropped.bytes, dropped.in_use) == (
                TierKind.HOST,
                6,
                6 * BLOCK_BYTES,
                2,
            )
            assert await one.lookup(keys(6)) == 0 and await one.lookup(keys(5, "b")) == 5
            assert [bytes(view) for view in leased.blocks] == [bytes(block.data) for block in mine[:2]]
            assert leased.still_valid()
            stats = store.stats()
            assert (stats.detached, stats.used_bytes) == (2, 7 * BLOCK_BYTES)
        await eventually(lambda: store.stats().used_bytes == 5 * BLOCK_BYTES)
        assert store.stats().detached == 0
        assert await read(client, keys(5, "b")) == [bytes(block.data) for block in theirs]
        assert await client.put(mine, MINE) == 6, "the tenant may store them again"
        assert await read(client, keys(6)) == [bytes(block.data) for block in mine]


async def test_promised_blocks_go_too_and_nobodys_stay() -> None:
    async with open_kvstore(settings()) as store, client_of(store.address) as client, raw(store.address) as one:
        await client.put(puts(3), MINE)
        await client.put(puts(3, "n"))
        assert (await client.retain(keys(3), 60.0, MINE.namespace))[1] == 3
        assert [one.blocks for one in await store.partitions.drop_tenant(MINE.namespace)] == [3]
        assert await one.lookup(keys(3)) == 0 and await one.lookup(keys(3, "n")) == 3


async def test_the_disk_forgets_them_for_the_next_process_too(tmp_path: Path) -> None:
    async with open_kvstore(disk_settings(tmp_path)) as store, client_of(store.address) as client:
        await client.put(puts(8), MINE)
        await client.put(puts(8, "b"), THEIRS)
    async with open_kvstore(disk_settings(tmp_path)) as store, client_of(store.address):
        await eventually(lambda: disk_has(store, keys(8)) == disk_has(store, keys(8, "b")) == 8)
        dropped = {one.kind: one.blocks for one in await store.partitions.drop_tenant(MINE.namespace)}
        assert dropped == {TierKind.HOST: 0, TierKind.NVME: 8}
        assert disk_has(store, keys(8)) == 0 and disk_has(store, keys(8, "b")) == 8
    async with open_kvstore(disk_settings(tmp_path)) as store, client_of(store.address):
        await eventually(lambda: disk_has(store, keys(8, "b")) == 8)
        assert disk_has(store, keys(8)) == 0, "its headers are gone"


class Passing(FakeTier):
    """A tier that the test asks to look for a tenant's blocks; each time something happens while it looks."""

    kind = TierKind.NVME

    def __init__(self, happens: list[Callable[[], object]]) -> None:
        self.happens = happens

    async def drop_tenant(self, namespace: bytes) -> Dropped:
        if self.happens:
            self.happens.pop(0)()
            return Dropped(self.kind, 1)
        return Dropped(self.kind)


async def test_what_passes_from_one_tier_to_another_is_found_all_the_same() -> None:
    """A block lands in host memory behind the look there; another is reserved before it, and lands afterwards."""
    async with open_kvstore(settings()) as store, raw(store.address) as one:
        await one.attach()
        table = store.store.host.table
        own = {}

        def reserve(put: BlockPut) -> None:
            wanted = Wanted(put.key, put.parent, put.first_token, namespace=MINE.namespace)
            own[put.key] = table.puts.reserve_own(wanted, time.monotonic()).block

        def land(put: BlockPut) -> None:
            block = own[put.key]
            assert table.puts.commit_own(Written(block.key, block.epoch, b"c" * 16), time.monotonic())

        first, second, kept = puts(1)[0], puts(1, "b")[0], puts(1, "k")[0]
        reserve(second)
        join(store, Passing([lambda: (reserve(first), land(first)), lambda: land(second)]))
        wanted = Wanted(kept.key, kept.parent, kept.first_token, namespace=THEIRS.namespace)
        own[kept.key] = table.puts.reserve_own(wanted, time.monotonic()).block
        dropped = {one.kind: one.blocks for one in await store.partitions.drop_tenant(MINE.namespace)}
        land(kept)
        assert dropped[TierKind.HOST] == 1
        assert [table.lookup([put.key]) for put in (first, second, kept)] == [0, 0, 1]
        assert table.puts.own == 0 and store.stats().used_bytes == BLOCK_BYTES
        reserve(second)
        land(second)
        assert table.lookup([second.key]) == 1, "what comes later may stay"
