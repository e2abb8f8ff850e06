"""Blocks that stay in a client's own pages: others find them there, and never get anything else from there."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from tests.services.kvstore.helpers import (
    BLOCK_BYTES,
    StoreProcess,
    client_of,
    disk_has,
    eventually,
    fetch,
    keys,
    puts,
    read,
    settings,
    spec,
)

from penstock.kv.bytes.arena import Arena, Layout
from penstock.kv.bytes.checksum import checksum
from penstock.kv.client.client import NOBODY, BlockPut, Origin, StoreClient, StoreFault
from penstock.kv.client.lending import BlockLoan
from penstock.kv.pace import Pace
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.kvstore.table.blocks import Block

TENANT = bytes(16)

LENDER = """
import asyncio, sys
from tests.services.kvstore.helpers import client_of, puts
from tests.services.kvstore.test_lending import Pages

async def main(address, count):
    async with client_of(address) as client:
        pages = Pages(client)
        await pages.lend(puts(int(count)))
        print("lent", file=sys.stderr, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@dataclass
class Pages:
    """A client with pages of its own."""

    client: StoreClient
    count: int = 64
    memory: Arena = field(init=False)
    opened: bool = False

    def __post_init__(self) -> None:
        layout = Layout.gapless(self.count, BLOCK_BYTES)
        self.memory = Arena(layout.offset(self.count))
        self.memory.format(layout)
        self.epochs = itertools.count(1)

    def write(self, page: int, data: memoryview) -> None:
        self.memory.block(page, BLOCK_BYTES)[:] = data

    async def lend(self, blocks: Sequence[BlockPut], first_page: int = 0, origin: Origin = NOBODY) -> list[BlockLoan]:
        if not self.opened:
            assert await self.client.lending.open(self.memory) == ""
            self.opened = True
        loans = []
        for page, block in enumerate(blocks, first_page):
            self.write(page, block.data)
            loan = BlockLoan(
                key=block.key,
                parent=block.parent,
                first_token=block.first_token,
                seconds=0.5,
                page=page,
                epoch=next(self.epochs),
                checksum=checksum(block.data),
                origin=origin,
            )
            self.memory.set_epoch(page, loan.epoch)
            loans.append(loan)
        await self.client.lending.lend(loans, self.memory)
        return loans


def under_way(store: KvStore, reading: asyncio.Task[list[bytes]], begun: bool) -> bool:
    """Whether a block has been read, or with `begun` is being copied."""
    return reading.done() or (begun and store.host.lent.busy)


@contextmanager
def lender_process(address: str, blocks: int) -> Iterator[subprocess.Popen[bytes]]:
    """A client that lends so many blocks of `puts`; it says so in a line on its stderr."""
    process = subprocess.Popen(
        [sys.executable, "-c", LENDER, address, str(blocks)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def contents(blocks: Sequence[BlockPut]) -> list[bytes]:
    return [bytes(block.data) for block in blocks]


@asynccontextmanager
async def lending(**other: object) -> AsyncIterator[tuple[KvStore, Pages, StoreClient]]:
    """A store, a client that lends, and another client."""
    async with open_kvstore(settings(**other)) as store:  # type: ignore[arg-type]
        async with client_of(store.address) as lender, client_of(store.address) as reader:
            yield store, Pages(lender), reader


async def test_lent_blocks_are_found_and_copied_only_when_somebody_asks() -> None:
    async with lending() as (store, pages, reader):
        blocks = puts(6)
        await pages.lend(blocks)
        assert await reader.lookup(keys(8)) == 6
        assert store.stats().blocks == store.stats().used_bytes == 0
        assert await read(reader, keys(4)) == contents(blocks[:4])
        assert (store.stats().blocks, len(store.host.lent)) == (4, 6)
        assert await fetch(reader, keys(8)) == contents(blocks)
        assert (await reader.touch([("s", keys(7))])) == keys(7)[6:]


async def test_a_chain_goes_on_where_its_next_block_is() -> None:
    """Whether it was put, or is lent by one client or another."""
    async with lending() as (_, pages, reader):
        blocks = puts(9)
        await pages.lend(blocks[2:4])
        await reader.put(blocks[:2])
        await reader.put(blocks[4:6])
        await Pages(reader).lend(blocks[6:])
        assert await reader.lookup(keys(9)) == 9
        assert await fetch(reader, keys(9)) == contents(blocks)


async def test_a_page_that_is_used_again_is_a_miss() -> None:
    """Before the store has heard of it, and whatever is in it then."""
    async with lending() as (store, pages, reader):
        blocks = puts(4)
        loans = await pages.lend(blocks)
        pages.memory.set_epoch(2, 0)
        assert await fetch(reader, keys(4)) == contents(blocks[:2])
        assert store.host.lent.torn == 1
        assert await reader.lookup(keys(4)) == 2
        assert store.stats().reserved == 0
        await pages.client.lending.lend([], pages.memory, [loans[2].key])  # it was forgotten already


async def test_a_late_writer_is_found_by_the_checksum() -> None:
    """Even one that breaks the rule and leaves the epoch."""
    async with lending() as (store, pages, reader):
        blocks = puts(3)
        await pages.lend(blocks)
        pages.memory.block(1, BLOCK_BYTES)[17] ^= 1
        assert await fetch(reader, keys(3)) == contents(blocks[:1])
        assert store.host.lent.torn == 1
        assert await reader.lookup(keys(3)) == 1
        assert store.host.lent.find(keys(3)[2]) is not None


async def test_a_writer_that_never_rests_never_gets_through() -> None:
    """Pages change hands all the time while others read them: what comes back is right, or nothing."""
    async with lending() as (store, pages, reader):
        right, wrong = puts(1, "r")[0], bytes(BLOCK_BYTES)
        served = 0
        for turn in range(90):
            await pages.lend([right])
            reading = asyncio.create_task(fetch(reader, [right.key]))
            if turn % 3:
                await eventually(partial(under_way, store, reading, turn % 3 == 1))
            pages.memory.set_epoch(0, 0)
            pages.write(0, memoryview(wrong))
            got = await reading
            assert got in ([], [bytes(right.data)])
            served += len(got)
            await pages.client.lending.lend([], pages.memory, [right.key])
            held = store.host.table.find(right.key)
            if held is not None:
                store.host.table.condemn(right.key, held.epoch, store.store.now())
            await eventually(lambda: not store.stats().leases)
        assert served and store.host.lent.torn, (served, store.host.lent.torn)


async def test_what_is_not_lent_any_more_is_gone_for_everybody() -> None:
    async with lending() as (store, pages, reader):
        await pages.lend(puts(4))
        with store.store.tiers.hub.subscribe() as subscriber:
            first = await subscriber.next()
            assert first is not None and first.snapshot and sorted(first.stored) == sorted(keys(4))
            await pages.client.lending.lend([], pages.memory, keys(4)[3:])
            change = await subscriber.next()
            assert change is not None and change.removed == keys(4)[3:]
        assert await reader.lookup(keys(4)) == 3


async def test_a_saved_block_outlives_its_page() -> None:
    async with lending() as (store, pages, reader):
        blocks = puts(5)
        await pages.lend(blocks)
        assert await pages.client.lending.save(keys(5)[3:]) == 2
        assert store.stats().blocks == 2
        for page in (3, 4):
            pages.memory.set_epoch(page, 0)
            pages.write(page, memoryview(bytes(BLOCK_BYTES)))
        await pages.client.lending.lend([], pages.memory, keys(5)[3:])
        assert await fetch(reader, keys(5)) == contents(blocks)


async def test_a_promise_holds_for_lent_blocks() -> None:
    """Those that are lent when it is made, and those that come later: they are in the store's own memory."""
    async with lending(retain_share=0.5, retain_tenant_share=0.5) as (store, pages, reader):
        blocks = puts(8)
        await pages.lend(blocks[:4])
        assert await reader.retain(keys(8), 60.0, TENANT) == (60.0, 8)
        assert store.stats().blocks == 4
        await pages.lend(blocks[4:], 4)
        assert store.stats().blocks == 8
        await pages.lend(puts(2, "other"), 20)
        assert store.stats().blocks == 8


async def test_who_waits_for_a_claim_is_served_by_a_loan() -> None:
    async with lending() as (store, pages, reader):
        pace = Pace(queue_s=0.0, block_s=1.0, growth_s=0.0, step_blocks=4)
        claimed = await pages.client.claim(pages.client.next_claim(), keys(4), pace)
        assert claimed.found == 0
        waiting = asyncio.create_task(reader.claim(reader.next_claim(), keys(4), pace))
        await eventually(lambda: store.store.claims.waiting)
        await pages.lend(puts(4))
        answer = await waiting
        assert (answer.found, answer.wait) == (4, "stored")


@pytest.mark.mesh
async def test_kill_9_of_the_lender_loses_nothing() -> None:
    async with open_kvstore(settings(32)) as store, client_of(store.address) as reader:
        with lender_process(store.address, 20) as process:
            assert process.stderr is not None
            assert await asyncio.to_thread(process.stderr.readline) == b"lent\n"
            assert await reader.lookup(keys(20)) == 20
            assert store.stats().blocks == 0
            process.send_signal(signal.SIGKILL)
        assert await read(reader, keys(20)[:5]) == contents(puts(20)[:5])
        await eventually(lambda: store.stats().attachments == 1)
        assert await reader.lookup(keys(20)) == 20
        await eventually(lambda: not store.host.lent.busy)
        assert (store.stats().blocks, len(store.host.lent), store.host.lent.rescued) == (20, 0, 20)
        assert await fetch(reader, keys(20)) == contents(puts(20))


async def test_what_does_not_fit_when_a_lender_leaves_is_what_was_used_longest_ago() -> None:
    async with open_kvstore(settings(16)) as store, client_of(store.address) as reader:
        async with client_of(store.address) as lender:
            pages = Pages(lender)
            await pages.lend(puts(30))
            await reader.touch([("s", keys(30)[:16])])
        await eventually(lambda: not store.host.lent.busy and not len(store.host.lent))
        assert await fetch(reader, keys(30)) == contents(puts(30)[:16])


async def test_a_page_that_was_torn_when_its_lender_died_is_left_out() -> None:
    async with open_kvstore(settings(32)) as store, client_of(store.address) as reader:
        async with client_of(store.address) as lender:
            pages = Pages(lender)
            await pages.lend(puts(8))
            pages.write(3, memoryview(bytes(BLOCK_BYTES)))
        await eventually(lambda: not store.host.lent.busy and not len(store.host.lent))
        assert (store.stats().blocks, store.host.lent.torn) == (7, 1)
        assert await fetch(reader, keys(8)) == contents(puts(8)[:3])


async def test_lent_blocks_reach_the_disk_from_where_they_are(tmp_path: Path) -> None:
    """Behind, as others do; and at the end, also those of a lender that the store outlives."""
    config = settings(nvme_dir=tmp_path, nvme_bytes=64 << 20)
    async with open_kvstore(config) as store:
        async with client_of(store.address) as lender:
            pages = Pages(lender)
            await pages.lend(puts(6))
            await eventually(lambda: disk_has(store, keys(6)) == 6)
            assert store.stats().blocks == 0
            await pages.lend(puts(6, "b"), 10)
            await store.store.stop()
    async with open_kvstore(config) as store, client_of(store.address) as reader:
        assert await read(reader, keys(6), "nvme") == contents(puts(6))
        assert await read(reader, keys(6, "b"), "nvme") == contents(puts(6, "b"))


async def test_a_torn_page_does_not_reach_the_disk(tmp_path: Path) -> None:
    async with lending(nvme_dir=tmp_path, nvme_bytes=64 << 20, nvme_write_bytes_per_s=1 << 20) as (store, pages, _):
        loan = BlockLoan(
            key=keys(1)[0], parent=bytes(32), first_token=0, seconds=0.0, page=0, epoch=9, checksum=bytes(16)
        )
        assert await pages.client.lending.open(pages.memory) == ""
        pages.memory.set_epoch(0, 9)
        await pages.client.lending.lend([loan], pages.memory)
        await eventually(lambda: store.host.lent.torn == 1)
        assert disk_has(store, keys(1)) == 0 == len(store.host.lent)


async def test_two_that_lend_the_same_block() -> None:
    """The first one's is used, until it ends; a block of one that is gone is taken over."""
    async with open_kvstore(settings()) as store, client_of(store.address) as reader:
        async with client_of(store.address) as first:
            one, two = Pages(first), Pages(reader)
            await one.lend(puts(2))
            await two.lend(puts(2))
            assert {store.host.lent.find(key).owner for key in keys(2)} == {first.attachment}  # type: ignore[union-attr]
            await two.client.lending.lend([], two.memory, keys(2))
            assert await reader.lookup(keys(2)) == 2
            await one.client.lending.lend([], one.memory, keys(2))
            assert await reader.lookup(keys(2)) == 0


async def test_a_page_lends_one_block_at_a_time() -> None:
    async with lending() as (_, pages, reader):
        await pages.lend(puts(1))
        await pages.lend(puts(1, "b"))
        assert (await reader.lookup(keys(1)), await reader.lookup(keys(1, "b"))) == (0, 1)


async def test_pages_that_are_no_memory_of_a_client_are_refused() -> None:
    async with lending() as (_, pages, _reader):
        client = pages.client
        with tempfile.TemporaryFile() as plain:
            plain.truncate(pages.memory.size)
            real, number = pages.memory._fd, plain.fileno()
            pages.memory._fd = number  # what others could change the size of
            assert "can't be mapped" in await client.lending.open(pages.memory)
            pages.memory._fd = real
        pages.memory.arena_id, mine = bytes(16), pages.memory.arena_id
        assert "another arena" in await client.lending.open(pages.memory)
        pages.memory.arena_id = mine
        with pytest.raises(StoreFault, match="has not shown its pages"):
            await client.lending.lend(
                [
                    BlockLoan(
                        key=keys(1)[0], parent=bytes(32), first_token=0, seconds=0, page=0, epoch=1, checksum=bytes(16)
                    )
                ],
                pages.memory,
            )
        await pages.lend(puts(1))
        with pytest.raises(StoreFault, match="already"):
            await client.lending.open(pages.memory)
        outside = BlockLoan(
            key=keys(1)[0], parent=bytes(32), first_token=0, seconds=0, page=64, epoch=1, checksum=bytes(16)
        )
        with pytest.raises(StoreFault, match="not a slot"):
            await client.lending.lend([outside], pages.memory)


async def test_a_client_elsewhere_lends_nothing() -> None:
    async with open_kvstore(settings()) as store, client_of(store.address, host="another") as client:
        assert "no memory" in await client.lending.open(Pages(client).memory)


async def test_another_spec_forgets_what_was_lent() -> None:
    async with open_kvstore(settings()) as store:
        async with client_of(store.address) as lender:
            await Pages(lender).lend(puts(3))
        await eventually(lambda: not store.host.lent.busy)
        async with client_of(store.address, spec(model="ef" * 32)) as other:
            await eventually(lambda: other.connected)
            assert await other.lookup(keys(3)) == len(store.host.lent) == 0


@pytest.mark.mesh
async def test_a_store_that_dies_leaves_the_pages_as_they_are() -> None:
    store = StoreProcess()
    try:
        async with client_of(store.address, timeout_s=10.0) as lender:
            pages = Pages(lender)
            await pages.lend(puts(3))
            before = lender.attachment
            store.restart()
            await eventually(lambda: lender.attachment not in ("", before))
            assert await lender.lookup(keys(3)) == 0
            pages.opened = False
            await pages.lend(puts(3))
            assert await fetch(lender, keys(3)) == contents(puts(3))
    finally:
        store.close()


async def test_a_lent_block_that_leaves_the_arena_has_not_left_host_memory() -> None:
    """Those who follow host memory hear of it when it is neither there nor lent."""
    gone = []

    class Watcher:
        def block_stored(self, block: Block) -> None: ...

        def block_removed(self, block: Block) -> None:
            gone.append(block.key)

    async with lending() as (store, pages, reader):
        blocks = puts(2)
        await pages.lend(blocks)
        with store.host.watched_by(Watcher()):
            assert await fetch(reader, keys(2)) == contents(blocks)
            await eventually(lambda: not store.stats().leases)
            for block in map(store.host.table.find, keys(2)):
                assert block is not None and store.host.table.condemn(block.key, block.epoch, store.store.now())
            assert gone == []
            assert await reader.lookup(keys(2)) == 2
            assert await fetch(reader, keys(2)[:1]) == contents(blocks[:1])
            await pages.client.lending.lend([], pages.memory, keys(2))
            assert gone == keys(2)[1:]
