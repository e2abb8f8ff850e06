"""A client that seals: a store, whoever maps its memory and whoever writes there have nothing of a tenant's blocks."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.services.kvstore.disk.disks import disk
from tests.services.kvstore.helpers import BLOCK_BYTES, HOST, eventually, keys, puts, raw, refs, settings, spec

from penstock.kv.bytes.checksum import checksum
from penstock.kv.client.client import BlockPut, Origin, StoreClient, StoreFault, open_store
from penstock.kv.sealing import TRAILER_BYTES, Seal, sealed
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.rpc.channels import open_channels

pytestmark = pytest.mark.attack


SEALED_BYTES = BLOCK_BYTES + TRAILER_BYTES
STRIDE = 4160
"""Of a slot."""
MINE, ANOTHERS = Origin(seal=b"m" * 32), Origin(seal=b"a" * 32)
both_ways = pytest.mark.parametrize("host", [HOST, "another-host"], ids=["mapped", "streamed"])


def store_of(**other: Any) -> AbstractAsyncContextManager[KvStore]:
    return open_kvstore(settings(32, STRIDE, **other))


@asynccontextmanager
async def client_of(store: KvStore, host: str = HOST) -> AsyncIterator[StoreClient]:
    async with (
        open_channels() as channels,
        open_store(channels.to(store.address, "store"), "test", sealed(spec()), host) as client,
    ):
        yield client


async def lease(client: StoreClient, count: int, origin: Origin = MINE) -> list[bytes]:
    """As workers read: each block is opened into its place."""
    found = []
    async with client.lease(keys(count), origin, checked=False) as leased:
        for index, view in enumerate(leased.blocks):
            into = bytearray(view.nbytes)
            if not leased.copy(index, memoryview(into)):
                break
            found.append(bytes(into))
    return found


async def fetch(client: StoreClient, count: int, origin: Origin = MINE) -> list[bytes]:
    into = [bytearray(BLOCK_BYTES) for _ in range(count)]
    tiers = await client.fetch(keys(count), [memoryview(one) for one in into], origin)
    return [bytes(one) for one in into[: len(tiers)]]


Read = Callable[..., Awaitable[list[bytes]]]
both_reads = pytest.mark.parametrize("read", [lease, fetch])


@both_ways
@both_reads
async def test_what_one_worker_seals_another_opens(host: str, read: Read) -> None:
    blocks = puts(8)
    async with store_of() as store, client_of(store, host) as client, client_of(store) as other:
        assert await client.put(blocks, MINE) == 8
        whole = [bytes(block.data) for block in blocks]
        assert await read(client, 8) == whole
        assert await read(other, 8) == whole
        assert store.stats().quarantined == 0


@both_ways
async def test_nobody_sees_what_is_stored(host: str) -> None:
    text = b"what the tenant has asked, in so many keys and values " * 76
    block = BlockPut(keys(1)[0], bytes(32), 0, memoryview(text[:BLOCK_BYTES]))
    async with store_of() as store, client_of(store, host) as client, raw(store.address) as rogue:
        assert await client.put([block], MINE) == 1
        await rogue.attach(sealed(spec()))
        [found] = refs(await rogue.lease(keys(1)))
        stored = bytes(rogue.map().block(found.offset, found.length))
        assert len(stored) == SEALED_BYTES
        assert not any(text[at : at + 8] in stored for at in range(64))
        assert checksum(stored) == found.checksum, "a store can tell whole blocks from torn ones"


@both_ways
@both_reads
async def test_a_key_of_another_tenant_opens_nothing(host: str, read: Read) -> None:
    async with store_of() as store, client_of(store, host) as client:
        await client.put(puts(4), MINE)
        assert await read(client, 4, ANOTHERS) == []


Sealed = list[bytearray]
"""The blocks of a chain as their tenant has sealed them."""


def _flip(blocks: Sealed) -> None:
    blocks[1][100] ^= 1


def _swap(blocks: Sealed) -> None:
    blocks[1], blocks[2] = blocks[2], blocks[1]


def _forge(blocks: Sealed) -> None:
    Seal(b"f" * 32).close(keys(4)[1], memoryview(bytes(BLOCK_BYTES)), memoryview(blocks[1]))


def _plain(blocks: Sealed) -> None:
    blocks[1][:] = bytes(SEALED_BYTES)


@both_ways
@both_reads
@pytest.mark.parametrize("attack", [_flip, _swap, _forge, _plain])
async def test_what_was_forged_swapped_or_moved_is_a_miss(
    host: str, read: Read, attack: Callable[[Sealed], None]
) -> None:
    """By somebody who reaches the store, and gives it checksums that fit."""
    blocks, bad = puts(4), [bytearray(SEALED_BYTES) for _ in range(4)]
    for block, into in zip(blocks, bad, strict=True):
        Seal(MINE.seal).close(block.key, block.data, memoryview(into))
    attack(bad)
    forged = [replace(block, data=memoryview(data)) for block, data in zip(blocks, bad, strict=True)]
    async with store_of() as store, client_of(store, host) as client:
        async with raw(store.address) as rogue:
            await rogue.attach(sealed(spec()))
            rooms = list((await rogue.reserve(forged)).blocks)
            memory = rogue.map()
            for block, room in zip(forged, rooms, strict=True):
                memory.block(room.offset, SEALED_BYTES)[:] = block.data
            assert await rogue.commit(forged, rooms) == [True] * 4
        assert await read(client, 4) == [bytes(blocks[0].data)]
        await eventually(lambda: store.stats().quarantined == 1)
        assert await client.lookup(keys(4)) == 1, "out of service"
        assert await client.put(blocks[1:2], MINE) == 1, "computed again and stored again"
        assert len(await read(client, 4)) == (2 if attack is _swap else 4)


async def test_without_a_key_nothing_is_stored_and_nothing_read() -> None:
    async with store_of() as store, client_of(store) as client:
        for call in (client.put(puts(1)), client.fetch(keys(1), [memoryview(bytearray(BLOCK_BYTES))])):
            with pytest.raises(StoreFault, match="blocks are sealed here, and the request came without a key"):
                await call
        with pytest.raises(StoreFault):
            async with client.lease(keys(1)):
                pass
        assert store.stats().blocks == 0


async def test_sealed_blocks_and_others_are_never_taken_for_each_other() -> None:
    async with open_kvstore(settings(32, STRIDE, partitions=2)) as store, raw(store.address) as plain:
        async with client_of(store) as client:
            await client.put(puts(4), MINE)
            await plain.attach(spec())
            assert not (await plain.lease(keys(4))).offsets


def everything(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


async def test_a_disk_has_ciphertext_and_gives_it_back(tmp_path: Path) -> None:
    marks = [hashlib.sha256(bytes([number])).digest() * 128 for number in range(16)]
    blocks = [
        BlockPut(key, keys(16)[number - 1] if number else bytes(32), number * 16, memoryview(marks[number]))
        for number, key in enumerate(keys(16))
    ]
    where = {"nvme_dir": tmp_path, "nvme_bytes": 1 << 22}
    async with store_of(**where) as store, client_of(store) as client:
        await client.put(blocks, MINE)
    files = everything(tmp_path)
    assert len(files) > 16 * SEALED_BYTES
    assert not any(mark[:32] in files for mark in marks)
    async with store_of(**where) as store, client_of(store) as client:
        assert await lease(client, 16) == [bytes(block.data) for block in blocks]
        assert disk(store).read_blocks == 16
