"""The client library against real stores: what comes back is right, or less, or a fault; never late, never wrong."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import pytest
from tests.services.kvstore.helpers import (
    BLOCK_BYTES,
    HOST,
    Raw,
    client_of,
    eventually,
    fetch,
    keys,
    puts,
    raw,
    read,
    refs,
    settings,
    spec,
)

from penstock.kv.bytes.arena import Arena
from penstock.kv.bytes.copying import sum_and_copy
from penstock.kv.client import link, writing
from penstock.kv.client.client import BlockPut, StoreClient, StoreFault, open_store
from penstock.kvstore.service import open_kvstore
from penstock.kvstore.table import puts as puts_module

BIG = (5 << 19) + 64
"""Two chunks and a half: copied in a thread, streamed in pieces."""

both_ways = pytest.mark.parametrize("host", [HOST, "another-host"], ids=["arena", "stream"])


@both_ways
@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, BIG])
async def test_what_was_put_comes_back(host: str, block_bytes: int) -> None:
    blocks = puts(6, block_bytes=block_bytes)
    config = settings(16, block_bytes)
    async with open_kvstore(config) as store, client_of(store.address, spec(block_bytes), host) as client:
        assert client.connected
        assert client.stats.mapped == (host == HOST)
        assert await client.put(blocks) == 6
        assert await client.lookup(keys(8)) == 6
        assert await read(client, keys(8)) == [bytes(block.data) for block in blocks]
        assert await fetch(client, keys(8), block_bytes) == [bytes(block.data) for block in blocks]
        assert await read(client, keys(8, "b")) == await read(client, []) == []
        assert await fetch(client, keys(8, "b"), block_bytes) == await fetch(client, []) == []
        assert await client.lookup([]) == await client.put([]) == 0
        stats = client.stats
        assert (stats.fetched, stats.put, stats.bytes_in, stats.bytes_out) == (12, 6, 12 * block_bytes, 6 * block_bytes)
        await eventually(lambda: store.stats().leases == 0)


async def test_views_are_read_only_and_end_with_the_lease() -> None:
    async with open_kvstore(settings()) as store, client_of(store.address) as client:
        await client.put(puts(1))
        async with client.lease(keys(1)) as leased:
            view = leased.blocks[0]
            with pytest.raises(TypeError):
                view[0] = 1
            assert store.stats().leases == 1
        with pytest.raises(ValueError, match="released"):
            bytes(view)


async def test_a_lease_ends_also_when_its_reader_fails() -> None:
    async with open_kvstore(settings()) as store, client_of(store.address) as client:
        await client.put(puts(1))
        with pytest.raises(KeyError):
            async with client.lease(keys(1)):
                raise KeyError
        await eventually(lambda: store.stats().leases == 0)


@both_ways
async def test_what_is_stored_is_not_sent_again(host: str) -> None:
    blocks = puts(10)
    async with open_kvstore(settings()) as store, client_of(store.address, host=host) as client:
        assert await client.put(blocks[:4]) == 4
        assert await client.put(blocks) == 6
        assert await client.put(blocks) == 0
        assert client.stats.bytes_out == 10 * BLOCK_BYTES
        assert store.stats().puts == 10


@both_ways
async def test_a_full_store_takes_what_fits(host: str) -> None:
    async with open_kvstore(settings(16)) as store, client_of(store.address, host=host) as client:
        assert await client.put(puts(20)) == 16
        assert await client.lookup(keys(20)) == 16
        assert store.stats().evictions == 0


async def test_a_block_of_the_wrong_size_is_a_bug() -> None:
    async with open_kvstore(settings()) as store, client_of(store.address) as client:
        with pytest.raises(ValueError, match="a block has 5 bytes, the spec says 4096"):
            await client.put([BlockPut(keys(1)[0], bytes(32), 0, memoryview(b"12345"))])
        assert store.stats().reserved == 0


def _flip(one: bytearray, other: bytearray) -> None:
    one[1234] ^= 1


def _swap(one: bytearray, other: bytearray) -> None:
    one[:], other[:] = bytes(other), bytes(one)


def _truncate(one: bytearray, other: bytearray) -> None:
    one[-100:] = bytes(100)


def _shift(one: bytearray, other: bytearray) -> None:
    one[:] = one[1:] + one[:1]


async def tamper(rogue: Raw, harm: Callable[[bytearray, bytearray], None]) -> None:
    """Changes blocks 3 and 5 in the shared memory, behind the store's back."""
    await rogue.attach()
    memory = rogue.map()
    stored = refs(await rogue.lease(keys(8)))
    views = [memory.block(stored[index].offset, stored[index].length) for index in (3, 5)]
    copies = [bytearray(view) for view in views]
    harm(*copies)
    for view, copy in zip(views, copies, strict=True):
        view[:] = copy


async def read_and_check(store: StoreClient, names: Sequence[bytes]) -> list[bytes]:
    """Copies that are checked one by one, as the worker does it."""
    copies: list[bytes] = []
    async with store.lease(names, checked=False) as leased:
        for index, view in enumerate(leased.blocks):
            into = bytearray(view.nbytes)
            if not leased.copy(index, memoryview(into)):
                return copies[:index]
            copies.append(bytes(into))
    return copies


@both_ways
@pytest.mark.parametrize("read", [read, fetch, read_and_check])
@pytest.mark.parametrize("harm", [_flip, _swap, _truncate, _shift])
async def test_harmed_blocks_are_never_served(
    host: str,
    read: Callable[[StoreClient, Sequence[bytes]], Awaitable[list[bytes]]],
    harm: Callable[[bytearray, bytearray], None],
) -> None:
    blocks = puts(8)
    async with open_kvstore(settings()) as store, client_of(store.address, host=host) as client:
        await client.put(blocks)
        async with raw(store.address) as rogue:
            await tamper(rogue, harm)
        await eventually(lambda: store.stats().attachments == 1)
        whole = [bytes(block.data) for block in blocks]
        assert await read(client, keys(8)) == whole[:3]
        assert (client.stats.mismatches, store.stats().quarantined) == (1, 1)
        assert await client.lookup(keys(8)) == 3, "out of service for everybody"
        assert await client.put(blocks) == 1, "computed again and stored again"
        if harm is _swap:
            assert await read(client, keys(8)) == whole[:5]
            assert await client.put(blocks) == 1
        assert await read(client, keys(8)) == whole


async def test_a_reader_that_is_too_slow_is_told() -> None:
    async with open_kvstore(settings(16, lease_s=0.02)) as store, client_of(store.address) as client:
        await client.put(puts(16))
        async with client.lease(keys(16)) as leased:
            assert leased.still_valid()
            await eventually(lambda: store.stats().leases == 0)
            assert leased.still_valid(), "over, but every slot is still as it was"
            await client.put(puts(1, "b"))
            assert not leased.still_valid()
        await eventually(lambda: client.stats.lapsed == 1)


async def test_cancelling_a_put_gives_its_room_back() -> None:
    blocks = puts(12, block_bytes=BIG)
    async with open_kvstore(settings(16, BIG)) as store, client_of(store.address, spec(BIG)) as client:
        putting = asyncio.ensure_future(client.put(blocks))
        await eventually(lambda: store.stats().reserved == 12)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        await eventually(lambda: store.stats().reserved == 0)
        stats = store.stats()
        assert (stats.used_bytes, stats.cooling) == (stats.blocks * BIG, 0)
        assert await client.put(blocks) == 12 - stats.blocks
        assert await read(client, keys(12)) == [bytes(block.data) for block in blocks]


async def test_a_caller_that_leaves_while_it_asks_keeps_nothing() -> None:
    async with open_kvstore(settings()) as store, client_of(store.address) as client:
        await client.put(puts(4))
        for turns in range(40):
            for asking in (read(client, keys(4)), client.put(puts(4, f"t{turns}"))):
                task = asyncio.ensure_future(asking)
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
        async with asyncio.timeout(2):
            await eventually(lambda: not store.stats().leases and not store.stats().reserved)
        stats = store.stats()
        assert (stats.used_bytes, stats.cooling) == (stats.blocks * BLOCK_BYTES, 0)
        assert (stats.expired_leases, stats.expired_reservations) == (0, 0)


@both_ways
async def test_a_put_of_many_batches_stores_all_of_them(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_BATCH", 3)
    blocks = puts(20)
    async with open_kvstore(settings()) as store, client_of(store.address, host=host) as client:
        assert await client.put(blocks[4:6]) == 2
        assert await client.put(blocks) == 18
        assert await read(client, keys(20)) == [bytes(block.data) for block in blocks]
        assert (client.stats.put, client.stats.late_commits, store.stats().reserved) == (20, 0, 0)
    async with open_kvstore(settings(16)) as store, client_of(store.address, host=host) as client:
        assert await client.put(blocks) == 16, "as many as there is room for"
        assert await client.lookup(keys(20)) == 16


@both_ways
async def test_a_put_larger_than_what_a_client_may_reserve_stores_all_of_it(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reserves while earlier batches are not committed yet; what has no room for that waits for them."""
    monkeypatch.setattr(writing, "MAX_BATCH", 40)
    monkeypatch.setattr(link, "_INLINE_BYTES", 0)  # the next batch is reserved meanwhile
    monkeypatch.setattr(puts_module, "_ANY", 1)
    async with open_kvstore(settings(200)) as store, client_of(store.address, host=host) as client:
        assert await client.put(puts(100)) == 100
        assert await client.lookup(keys(100)) == 100
        assert await client.put([*puts(100), *puts(60, "b")]) == 60, "those that are there take no room"
        assert await client.lookup(keys(60, "b")) == 60
        assert (store.stats().reserved, store.stats().refused_commits) == (0, 0)


@both_ways
async def test_a_put_of_many_batches_that_is_left_keeps_nothing(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whatever point: one batch may be reserved, one written and one committed at that time."""
    monkeypatch.setattr(writing, "MAX_BATCH", 3)
    async with open_kvstore(settings()) as store, client_of(store.address, host=host) as client:
        for turns in range(60):
            task = asyncio.ensure_future(client.put(puts(12, f"t{turns}")))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        await eventually(lambda: not store.stats().reserved)
        stats = store.stats()
        assert (stats.used_bytes, stats.cooling) == (stats.blocks * BLOCK_BYTES, 0)
        assert stats.expired_reservations == 0


async def test_a_batch_that_fails_takes_the_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_BATCH", 3)
    copies = itertools.count()

    def fails(target: memoryview, source: memoryview, behind: bytes) -> bytes:
        if next(copies) == 7:
            raise ValueError("not a slot")
        return sum_and_copy(target, source, behind)

    monkeypatch.setattr(writing, "sum_and_copy", fails)
    blocks = puts(20)
    async with open_kvstore(settings()) as store, client_of(store.address) as client:
        with pytest.raises(StoreFault, match="not a slot"):
            await client.put(blocks)
        await eventually(lambda: not store.stats().reserved)
        found = await client.lookup(keys(20))
        assert found in (3, 6), "the batches before it, but for one whose commit was under way"
        assert await client.put(blocks) == 20 - found
        assert await read(client, keys(20)) == [bytes(block.data) for block in blocks]


async def test_without_a_store_every_call_fails_at_once() -> None:
    async with client_of("127.0.0.1:1") as away, open_store(None, "test", spec(), HOST) as none:
        for client in (away, none):
            assert not client.connected
            for call in (
                lambda c=client: c.lookup(keys(1)),
                lambda c=client: c.put(puts(1)),
                lambda c=client: read(c, keys(1)),
            ):
                begin = time.perf_counter()
                for _ in range(100):
                    with pytest.raises(StoreFault, match="not connected"):
                        await call()
                assert time.perf_counter() - begin < 100 * 0.005
            assert client.stats.faults == 300
        assert none.reason == "no store is configured"


async def test_a_refused_client_knows_why() -> None:
    async with open_kvstore(settings()) as store, client_of(store.address):
        async with client_of(store.address, spec(dtype="bfloat16")) as other:
            assert not other.connected
            with pytest.raises(StoreFault, match="dtype is 'float32' here and 'bfloat16' there"):
                await other.lookup(keys(1))


async def test_a_refused_client_is_let_in_when_the_others_have_left() -> None:
    async with open_kvstore(settings()) as store, AsyncExitStack() as first:
        await first.enter_async_context(client_of(store.address))
        async with client_of(store.address, spec(dtype="bfloat16")) as other:
            assert not other.connected
            await first.aclose()
            await eventually(lambda: other.connected)
            assert await other.put(puts(1)) == 1


async def test_a_path_that_leads_nowhere_means_streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "path", property(lambda self: "/proc/1/fd/9999"))
    async with open_kvstore(settings()) as store, client_of(store.address) as client:
        assert (client.stats.attached, client.stats.mapped) == (1, 0)
        assert await client.put(puts(3)) == 3
        assert len(await read(client, keys(3))) == 3


async def test_many_clients_at_once_agree() -> None:
    blocks = puts(40)
    async with open_kvstore(settings()) as store, AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(client_of(store.address, host=host)) for host in (HOST, HOST, "x", "y")
        ]
        stored = await asyncio.gather(*(client.put(blocks) for client in clients))
        assert sum(stored) == 40
        for copies in await asyncio.gather(*(read(client, keys(40)) for client in clients)):
            assert copies == [bytes(block.data) for block in blocks]
