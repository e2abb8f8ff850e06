"""Readers of blocks of which the far part is enough: they read that and nothing else, and find out what is wrong with
it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.services.kvstore.disk.disks import disk
from tests.services.kvstore.helpers import BLOCK_BYTES, HOST, disk_has, eventually, keys, puts, raw, settings, spec
from tests.services.kvstore.test_lending import Pages, contents

from penstock.kv.client.client import NOBODY, BlockPut, Origin, StoreClient, open_store
from penstock.kv.client.lending import BlockLoan
from penstock.kv.parts import MARK_BYTES, BlockParts, Reach, parted
from penstock.kv.sealing import TRAILER_BYTES, sealed
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.rpc.channels import open_channels
from penstock.v1 import kvstore_pb2

PARTS = BlockParts(BLOCK_BYTES, ((512, 768), (2048, 2560)), Reach(64))
FAR_BYTES = 768 + MARK_BYTES
STRIDE = 4160
"""Of a slot."""
both_ways = pytest.mark.parametrize("host", [HOST, "another-host"], ids=["mapped", "streamed"])


def store_of(blocks: int = 32, **other: Any) -> Any:
    return open_kvstore(settings(blocks, STRIDE, **other))


@asynccontextmanager
async def client_of(store: KvStore, host: str = HOST, seals: bool = False) -> AsyncIterator[StoreClient]:
    known = sealed(spec(), PARTS) if seals else parted(spec())
    async with (
        open_channels() as channels,
        open_store(channels.to(store.address, "store"), "test", known, host, parts=PARTS) as client,
    ):
        yield client


async def lease(
    client: StoreClient, count: int, far: int, origin: Origin = NOBODY, *, checked: bool = False
) -> list[bytes]:
    """Copies, into zeros; of the first `far` the far part."""
    found = []
    async with client.lease(keys(count), origin, checked=checked, far=lambda found: min(far, found)) as leased:
        for index in range(len(leased.blocks)):
            into = bytearray(BLOCK_BYTES)
            if not leased.copy(index, memoryview(into)):
                break
            found.append(bytes(into))
    return found


def far_part(block: BlockPut) -> bytes:
    into = bytearray(BLOCK_BYTES)
    PARTS.copy(memoryview(into), block.data)
    return bytes(into)


def expected(blocks: Sequence[BlockPut], far: int) -> list[bytes]:
    return [*map(far_part, blocks[:far]), *contents(blocks[far:])]


@both_ways
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("far", [0, 5, 8])
async def test_only_what_is_enough_is_read(host: str, checked: bool, far: int) -> None:
    blocks = puts(8)
    async with store_of() as store, client_of(store, host) as writer, client_of(store, host) as reader:
        assert await writer.put(blocks) == 8
        assert await lease(reader, 10, far, checked=checked) == expected(blocks, far)
        assert (reader.stats.fetched, reader.stats.far) == (8, far)
        assert reader.stats.bytes_in == far * FAR_BYTES + (8 - far) * (BLOCK_BYTES + MARK_BYTES)
        into = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(8)]
        assert len(await reader.fetch(keys(8), into)) == 8
        assert [bytes(one) for one in into] == contents(blocks)
        assert store.stats().quarantined == reader.stats.mismatches == 0


SEALED_BYTES = BLOCK_BYTES + 2 * TRAILER_BYTES
MINE, ANOTHERS = Origin(seal=b"m" * 32), Origin(seal=b"a" * 32)


@both_ways
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("far", [0, 5, 8])
async def test_sealed_parts_are_opened_each_by_itself(host: str, checked: bool, far: int) -> None:
    blocks = puts(8)
    async with store_of() as store, client_of(store, host, True) as writer, client_of(store, host, True) as reader:
        assert await writer.put(blocks, MINE) == 8
        assert await lease(reader, 10, far, MINE, checked=checked) == expected(blocks, far)
        assert reader.stats.bytes_in == far * (768 + 16 + 12) + (8 - far) * SEALED_BYTES
        into = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(8)]
        assert len(await reader.fetch(keys(8), into, MINE)) == 8
        assert [bytes(one) for one in into] == contents(blocks)
        assert await lease(reader, 8, 8, ANOTHERS) == []
        await eventually(lambda: store.stats().quarantined == 1)


@both_ways
@pytest.mark.parametrize(
    ("at", "far"), [(0, True), (767 + 16, True), (BLOCK_BYTES + 32, True), (900, False), (BLOCK_BYTES + 45, False)]
)
async def test_a_sealed_part_that_is_wrong_does_not_open(host: str, at: int, far: bool) -> None:
    """Its text, its tag or its nonce; the other part opens."""
    blocks = puts(8)
    async with store_of() as store, client_of(store, host, True) as client:
        await client.put(blocks, MINE)
        damage(store, keys(8)[3], at)
        assert await lease(client, 8, 6, MINE) == expected(blocks, 6)[: 3 if far else 8]
        if not far:
            assert await lease(client, 8, 0, MINE) == expected(blocks, 0)[:3]
        await eventually(lambda: store.stats().quarantined == 1)


async def test_a_store_that_sends_no_parts_is_asked_for_whole_blocks() -> None:
    blocks = puts(6)
    async with store_of() as store, client_of(store, "another-host") as client:
        await client.put(blocks)
        attachment = client._link.need()
        assert attachment.ranges
        attachment.ranges = False  # an older one
        assert await lease(client, 6, 5) == expected(blocks, 0)
        assert (client.stats.fetched, client.stats.far, client.stats.mismatches) == (6, 0, 0)


def reading(
    attachment: str, lease: int, indices: Sequence[int], ranges: Sequence[tuple[int, int]]
) -> kvstore_pb2.ReadRequest:
    """Asks for these ranges of bytes of some blocks of a lease."""
    wanted = [kvstore_pb2.BlockRange(begin=begin, end=end) for begin, end in ranges]
    return kvstore_pb2.ReadRequest(attachment_id=attachment, lease_id=lease, indices=indices, ranges=wanted)


async def test_who_is_far_away_is_sent_nothing_else() -> None:
    blocks = puts(6)
    async with store_of() as store, client_of(store) as writer, raw(store.address) as client:
        await writer.put(blocks)
        await client.attach(parted(spec()))
        answer = await client.lease(keys(6))
        request = reading(client.attached.attachment_id, answer.lease_id, range(6), PARTS.wanted)
        sent = b"".join([message.data async for message in client.stub.Read(request)])
        assert len(sent) == 6 * FAR_BYTES
        request.at = 300
        assert b"".join([message.data async for message in client.stub.Read(request)]) == sent[request.at :]


async def test_messages_of_many_small_pieces_stay_short() -> None:
    """The worst that a client may ask: the store makes other messages between these."""
    ranges = [(9 * at, 9 * at + 8) for at in range(256)]
    async with store_of() as store, client_of(store) as writer, raw(store.address) as client:
        await writer.put(puts(1))
        await client.attach(parted(spec()))
        answer = await client.lease(keys(1))
        request = reading(client.attached.attachment_id, answer.lease_id, [0] * 1000, ranges)
        sent = [message.data async for message in client.stub.Read(request)]
        assert {len(data) for data in sent[:-1]} == {4096 * 8}
        block = bytes(puts(1)[0].data)
        assert b"".join(sent) == b"".join(block[begin:end] for begin, end in ranges) * 1000


@both_ways
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("at", [600, 2500, BLOCK_BYTES + 3], ids=["far", "far too", "mark"])
async def test_a_far_part_that_is_wrong_ends_the_prefix(host: str, checked: bool, at: int) -> None:
    blocks = puts(8)
    async with store_of() as store, client_of(store, host) as client:
        await client.put(blocks)
        damage(store, keys(8)[3], at)
        assert await lease(client, 8, 6, checked=checked) == expected(blocks, 6)[:3]
        await eventually(lambda: store.stats().quarantined == 1)
        assert await client.lookup(keys(8)) == 3, "out of service"
        assert await client.put(blocks[3:4]) == 1
        assert await lease(client, 8, 6, checked=checked) == expected(blocks, 6)


@both_ways
async def test_a_near_part_that_is_wrong_is_found_by_who_reads_it(host: str) -> None:
    blocks = puts(8)
    async with store_of() as store, client_of(store, host) as client:
        await client.put(blocks)
        damage(store, keys(8)[3], 100)
        assert await lease(client, 8, 6) == expected(blocks, 6)
        assert await lease(client, 8, 3) == expected(blocks, 3)[:3]
        await eventually(lambda: store.stats().quarantined == 1)


def damage(store: KvStore, key: bytes, at: int) -> None:
    block = store.host.table.find(key)
    assert block is not None
    store.host.view(block)[at] ^= 1


async def test_another_block_in_the_slot_is_no_copy() -> None:
    """Its mark fits its bytes; but it is of another name, and the slot is not the first one's any more."""
    blocks = puts(2)
    async with store_of() as store, client_of(store) as client:
        await client.put(blocks)
        first, second = (store.host.table.find(key) for key in keys(2))
        assert first is not None and second is not None
        async with client.lease(keys(1), checked=False, far=lambda found: found) as leased:
            store.host.view(first)[:] = store.host.view(second)
            assert not leased.copy(0, memoryview(bytearray(BLOCK_BYTES)))


async def test_a_slot_that_changed_hands_is_no_copy_even_of_the_same_bytes() -> None:
    async with store_of() as store, client_of(store) as client:
        await client.put(puts(1))
        async with client.lease(keys(1), checked=False, far=lambda found: found) as leased:
            block = store.host.table.find(keys(1)[0])
            assert block is not None
            store.host.arena.set_epoch(block.slot, block.epoch + 1)
            assert not leased.copy(0, memoryview(bytearray(BLOCK_BYTES)))
            store.host.arena.set_epoch(block.slot, block.epoch)


async def lend(pages: Pages, blocks: Sequence[BlockPut]) -> None:
    assert await pages.client.lending.open(pages.memory) == ""
    vouched = await pages.client.lending.vouch([(block.key, block.data) for block in blocks])
    loans = []
    for page, (block, said) in enumerate(zip(blocks, vouched, strict=True)):
        pages.write(page, block.data)
        pages.memory.set_epoch(page, page + 1)
        loans.append(
            BlockLoan(
                key=block.key,
                parent=block.parent,
                first_token=block.first_token,
                seconds=0.0,
                page=page,
                epoch=page + 1,
                checksum=said.checksum,
                behind=said.behind,
            )
        )
    await pages.client.lending.lend(loans, pages.memory)


@both_ways
async def test_what_is_lent_is_found_with_its_mark(host: str) -> None:
    blocks = puts(8)
    async with store_of() as store, client_of(store) as lender, client_of(store, host) as reader:
        await lend(Pages(lender), blocks)
        assert store.stats().blocks == 0
        assert await lease(reader, 8, 5) == expected(blocks, 5)
        assert store.host.lent.torn == 0


async def test_a_loan_without_a_mark_is_refused() -> None:
    async with store_of() as store, client_of(store) as lender:
        pages = Pages(lender)
        await lend(pages, puts(1))
        loan = BlockLoan(
            key=keys(2)[1], parent=bytes(32), first_token=16, seconds=0.0, page=1, epoch=9, checksum=bytes(16)
        )
        with pytest.raises(Exception, match="behind"):
            await lender.lending.lend([loan], pages.memory)
        assert len(store.host.lent) == 1


@pytest.mark.parametrize("lent", [False, True])
async def test_a_disk_keeps_both_parts(lent: bool, tmp_path: Path) -> None:
    blocks, where = puts(16), {"nvme_dir": tmp_path, "nvme_bytes": 1 << 22}
    async with store_of(**where) as store, client_of(store) as client:
        if lent:
            await lend(Pages(client), blocks)
        else:
            await client.put(blocks)
        await eventually(lambda: disk_has(store, keys(16)) == 16)
    async with store_of(**where) as store, client_of(store) as client:
        assert await lease(client, 16, 12) == expected(blocks, 12)
        assert disk(store).read_blocks == 16
        assert await lease(client, 16, 0) == contents(blocks), "a store has whole blocks"


@both_ways
async def test_a_neighbour_s_blocks_come_whole(host: str) -> None:
    blocks = puts(8)
    async with (
        store_of(host_id="one") as first,
        store_of(peers=(first.address,)) as second,
        client_of(first, "one") as writer,
        client_of(second, host) as reader,
    ):
        await writer.put(blocks)
        origin = replace(NOBODY, sources=(first.address,))
        assert await lease(reader, 8, 6, origin) == expected(blocks, 6)
        assert second.elsewhere.figures()["pulled_bytes"] == 8 * (BLOCK_BYTES + MARK_BYTES)


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 0)],
        [(5, 4)],
        [(0, 10), (9, 12)],
        [(20, 30), (0, 10)],
        [(0, BLOCK_BYTES + 100)],
        [(9 * at, 9 * at + 8) for at in range(257)],
        [(0, 7)],
        [(2 * at, 2 * at + 1) for at in range(256)],
    ],
)
async def test_ranges_that_are_none_are_refused(ranges: list[tuple[int, int]]) -> None:
    async with store_of() as store, client_of(store) as writer, raw(store.address) as client:
        await writer.put(puts(1))
        await client.attach(parted(spec()))
        answer = await client.lease(keys(1))
        request = reading(client.attached.attachment_id, answer.lease_id, [0], ranges)
        with pytest.raises(Exception, match="ranges"):
            async for _ in client.stub.Read(request):
                pass
