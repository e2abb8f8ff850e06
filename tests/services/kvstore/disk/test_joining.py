"""The disk is a tier of the store while the space of the spec in use is open; until then the store serves without."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.services.kvstore.disk.disks import contents, settings
from tests.services.kvstore.helpers import client_of, disk_has, disk_tier, eventually, keys, puts, raw, read, spec

from penstock.kv.spec import KvSpec
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.kvstore.table.blocks import TierKind
from penstock.kvstore.tiers.disk import opening as opening_module
from penstock.kvstore.tiers.disk import spaces as spaces_module
from penstock.kvstore.tiers.disk.files import Files
from penstock.kvstore.tiers.disk.home import Home
from penstock.kvstore.tiers.disk.slabs import SlabShape
from penstock.v1 import common_pb2, kvstore_pb2

OTHER = spec(model="99" * 32)


class SlowIndex(Files):
    """Reads wait for `go`."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()

    def read(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        self.begun.set()
        self.go.wait(10)
        return super().read(fd, buffers, at)


async def left(path: Path, count: int, block_spec: KvSpec | None = None) -> None:
    """A store leaves a chain on the disk."""
    async with (
        open_kvstore(settings(path, disk_blocks=2048)) as store,
        client_of(store.address, block_spec) as client,
    ):
        await client.put(puts(count))


def kinds(store: KvStore) -> list[TierKind]:
    return [tier.kind for tier in store.store.tiers]


async def test_the_store_serves_while_the_index_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await left(tmp_path, 12, OTHER)
    await left(tmp_path, 5)
    files = SlowIndex()
    files.go.set()
    monkeypatch.setattr(spaces_module, "Files", lambda: files)
    async with open_kvstore(settings(tmp_path, disk_blocks=2048)) as store, raw(store.address) as one:
        assert kinds(store) == [TierKind.HOST, TierKind.NVME, TierKind.REMOTE]
        assert await one.lookup(keys(5)) == 5
        files.go.clear()
        files.begun.clear()
        async with client_of(store.address, OTHER) as client:
            await eventually(files.begun.is_set)
            call = one.stub.Events(kvstore_pb2.EventsRequest())
            assert not (await call.read()).stored, "neither the blocks of before, nor those to come"
            assert kinds(store) == [TierKind.HOST, TierKind.REMOTE]
            await client.put(puts(4, "b"))
            assert await read(client, keys(4, "b")) == list(contents(4, "b").values())
            assert await client.lookup(keys(12)) == 0
            assert (await one.stats()).nvme.slots == 0
            files.go.set()
            await eventually(lambda: disk_has(store, keys(12)) == 12)
            assert kinds(store) == [TierKind.HOST, TierKind.NVME, TierKind.REMOTE]
            assert await read(client, keys(12), "nvme") == list(contents(12).values())
            await eventually(lambda: disk_has(store, keys(4, "b")) == 4)
            known: dict[bytes, int] = {}
            while not set(keys(12)) <= set(known):
                event = await call.read()
                known.update(dict.fromkeys(event.stored, event.tier))
            assert {known[key] for key in keys(12)} <= {common_pb2.TIER_NVME, common_pb2.TIER_HOST}
            call.cancel()


async def test_the_tier_of_another_spec_leaves_at_once(tmp_path: Path) -> None:
    await left(tmp_path, 5)
    async with open_kvstore(settings(tmp_path, disk_blocks=2048)) as store:
        tiers = store.store.tiers
        assert disk_has(store, keys(5)) == 5
        tiers.format_for(OTHER)
        assert (kinds(store), list(tiers.keys())) == ([TierKind.HOST, TierKind.REMOTE], []), "nothing was awaited"
        tiers.format_for(spec())
        tiers.format_for(OTHER)
        await tiers.settled()
        assert (disk_tier(store).spec, disk_has(store, keys(5))) == (OTHER, 0)
        tiers.format_for(spec())
        await tiers.settled()
        assert disk_has(store, keys(5)) == 5


async def test_what_was_stored_before_the_space_was_open_is_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await left(tmp_path, 5)
    await left(tmp_path, 1, OTHER)
    files = SlowIndex()
    files.go.set()
    monkeypatch.setattr(spaces_module, "Files", lambda: files)
    async with open_kvstore(settings(tmp_path, disk_blocks=2048)) as store:
        files.go.clear()
        files.begun.clear()
        async with client_of(store.address) as client:
            await eventually(files.begun.is_set)
            await client.put(puts(8, "b"))
            assert kinds(store) == [TierKind.HOST, TierKind.REMOTE]
        asyncio.get_running_loop().call_later(0.2, files.go.set)  # by then the store waits for it
    async with open_kvstore(settings(tmp_path, disk_blocks=2048)) as store:
        assert disk_has(store, keys(8, "b")) == 8
        assert disk_has(store, keys(5)) == 5


async def test_a_space_that_can_not_be_opened_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await left(tmp_path, 5)
    prepare, tries = Home.prepare, list[KvSpec]()

    async def failing(home: Home, wanted: KvSpec, total: int) -> SlabShape:
        tries.append(wanted)
        if len(tries) < 3:
            raise OSError("bad")
        return await prepare(home, wanted, total)

    monkeypatch.setattr(Home, "prepare", failing)
    monkeypatch.setattr(opening_module, "_RETRY_S", 0.3)
    async with (
        open_kvstore(settings(tmp_path, disk_blocks=2048)) as store,
        client_of(store.address) as client,
        raw(store.address) as one,
    ):
        assert len(tries) == 1, "it starts without"
        await client.put(puts(3, "b"))
        assert await read(client, keys(3, "b")) == list(contents(3, "b").values())
        assert (await one.stats()).nvme.write_failures >= 1
        await eventually(lambda: disk_has(store, keys(5)) == 5)
        assert await read(client, keys(5), "nvme") == list(contents(5).values())
    assert len(tries) == 3


async def test_a_store_that_ends_before_it_has_tried_again_tries_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, tries = Home.prepare, list[KvSpec]()

    async def failing(home: Home, wanted: KvSpec, total: int) -> SlabShape:
        tries.append(wanted)
        if len(tries) == 1:
            raise OSError("bad")
        return await prepare(home, wanted, total)

    monkeypatch.setattr(Home, "prepare", failing)
    async with asyncio.timeout(20):
        async with open_kvstore(settings(tmp_path, disk_blocks=2048)) as store, client_of(store.address) as client:
            await client.put(puts(3))
            await eventually(lambda: tries)
        assert len(tries) == 2
        async with open_kvstore(settings(tmp_path, disk_blocks=2048)) as store:
            assert disk_has(store, keys(3)) == 3


async def test_a_defect_of_the_disk_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last attempt is made once."""
    await left(tmp_path, 5)

    async def failing(home: Home, wanted: KvSpec, total: int) -> SlabShape:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Home, "prepare", failing)
    async with asyncio.timeout(20):
        async with open_kvstore(settings(tmp_path, disk_blocks=2048)) as store, client_of(store.address) as client:
            await client.put(puts(3))
            assert await client.lookup(keys(3)) == 3
            assert kinds(store) == [TierKind.HOST, TierKind.REMOTE]
