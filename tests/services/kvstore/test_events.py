"""What subscribers and the router hear."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from tests.services.kvstore.helpers import HOST, ROOT, eventually, keys, puts, raw, settings, spec

from penstock.kv.events import Change, EventHub, Subscriber
from penstock.kvstore.service import open_kvstore
from penstock.kvstore.table.blocks import TierKind
from penstock.rpc.server import serve
from penstock.v1 import common_pb2, kvstore_pb2, router_pb2, router_pb2_grpc


class Table:
    """A table and a hub that tells of it; what a reader made of the messages should equal the table."""

    def __init__(self, pending: int, piece: int) -> None:
        self.keys: dict[bytes, TierKind] = {}
        self.hub = EventHub(self._places, pending=pending, piece=piece)
        self.looked_at = 0

    def _places(self) -> Iterator[tuple[bytes, TierKind]]:
        for name in list(self.keys):
            self.looked_at += 1
            if name in self.keys:
                yield name, self.keys[name]

    def store(self, *names: bytes) -> None:
        for name in names:
            self.keys[name] = TierKind.HOST
            self.hub.note(name, TierKind.HOST)

    def remove(self, *names: bytes) -> None:
        for name in names:
            del self.keys[name]
            self.hub.note(name, None)


def apply(known: set[bytes], change: Any) -> None:
    if change.snapshot:
        known.clear()
    known.difference_update(change.removed)
    known.update(change.stored)


async def drain(subscriber: Subscriber, known: set[bytes]) -> int:
    """Reads what is there; returns how many messages that was."""
    count = 0
    while True:
        reading = asyncio.ensure_future(subscriber.next())
        await asyncio.sleep(0)
        if not reading.done():
            reading.cancel()
            return count
        change = reading.result()
        assert change is not None
        assert len(change.stored) + len(change.removed) <= 10
        apply(known, change)
        count += 1


async def test_a_snapshot_in_pieces_then_changes() -> None:
    table, names, known = Table(100, 10), keys(25), set[bytes]()
    table.store(*names)
    with table.hub.subscribe() as subscriber:
        first = await subscriber.next()
        assert first is not None and first.snapshot
        apply(known, first)
        table.remove(names[0], names[20])  # while the snapshot is under way
        assert await drain(subscriber, known) == 3
        assert known == set(table.keys)
        table.store(names[0])
        table.remove(names[0])
        assert await subscriber.next() == Change(removed=[names[0]]), "only the last change of a key counts"


async def test_a_large_snapshot_is_not_made_at_once() -> None:
    table, known = Table(1000, 10), set[bytes]()
    table.store(*keys(500))
    with table.hub.subscribe() as subscriber:
        for number in range(1, 20):
            change = await subscriber.next()
            assert change is not None
            apply(known, change)
            assert table.looked_at <= 10 * number + number, "one piece at a time: others want to be served meanwhile"
            table.remove(keys(500)[number], keys(500)[-number])
            table.store(*keys(1, f"new{number}"))
        while known != set(table.keys):
            change = await subscriber.next()
            assert change is not None
            apply(known, change)


async def test_every_message_is_of_one_tier_and_moves_are_told() -> None:
    table, names = Table(100, 10), keys(4)
    table.keys.update({names[0]: TierKind.HOST, names[1]: TierKind.NVME})
    with table.hub.subscribe() as subscriber:
        assert await subscriber.next() == Change(TierKind.HOST, stored=[names[0]], snapshot=True)
        assert await subscriber.next() == Change(TierKind.NVME, stored=[names[1]])
        table.hub.note(names[1], TierKind.HOST)
        table.hub.note(names[0], TierKind.NVME)
        table.hub.note(names[2], TierKind.NVME)
        table.hub.note(names[3], None)
        table.hub.note(names[2], TierKind.HOST)
        assert await subscriber.next() == Change(TierKind.HOST, stored=[names[1]])
        assert await subscriber.next() == Change(TierKind.NVME, stored=[names[0]], removed=[names[3]])
        assert await subscriber.next() == Change(TierKind.HOST, stored=[names[2]])


async def test_a_slow_reader_costs_bounded_memory_and_catches_up() -> None:
    table, known = Table(50, 10), set[bytes]()
    with table.hub.subscribe() as subscriber:
        await drain(subscriber, known)
        for number in range(40):
            table.store(*keys(10, f"chain{number}"))
            assert len(subscriber._pending) <= 50
        table.remove(*keys(10, "chain7"))
        assert table.hub.resynchronised >= 1
        await drain(subscriber, known)
        assert known == set(table.keys)
    assert table.hub.resynchronised >= 1


async def test_the_end_of_the_hub_ends_readers() -> None:
    table = Table(50, 10)
    with table.hub.subscribe() as subscriber:
        await subscriber.next()
        reading = asyncio.ensure_future(subscriber.next())
        table.hub.close()
        assert await reading is None
    with table.hub.subscribe() as late:
        assert await late.next() is None


async def test_events_over_the_wire() -> None:
    blocks, more = puts(10), puts(16, "b")
    async with AsyncExitStack() as clients, AsyncExitStack() as stores:
        store = await stores.enter_async_context(open_kvstore(settings(16)))
        one = await clients.enter_async_context(raw(store.address))
        await one.attach()
        await one.commit(blocks, (await one.reserve(blocks)).blocks)
        events = one.stub.Events(kvstore_pb2.EventsRequest())
        one.calls.append(events)
        first = await events.read()
        assert first.snapshot
        known = set(first.stored)
        assert known == set(keys(10))
        await one.commit(more, (await one.reserve(more)).blocks)
        async with asyncio.timeout(10):
            while known != set(keys(16, "b")):
                apply(known, await events.read())
        await stores.aclose()
        assert await events.read() is grpc.aio.EOF, "the store's end ends the stream"


async def test_a_subscriber_that_does_not_read_holds_nobody_up() -> None:
    async with open_kvstore(settings(64)) as store, raw(store.address) as one:
        await one.attach()
        lazy = one.stub.Events(kvstore_pb2.EventsRequest())
        one.calls.append(lazy)
        for number in range(40):
            blocks = puts(60, f"c{number}", 4096)
            assert all(await one.commit(blocks, (await one.reserve(blocks)).blocks))
        known: set[bytes] = set()
        expected = set(keys(60, "c39"))
        async with asyncio.timeout(10):
            while not expected <= known or len(known) != store.stats().blocks:
                apply(known, await lazy.read())


class FakeRouter(router_pb2_grpc.RouterServicer):
    """Remembers its members and what they told."""

    def __init__(self) -> None:
        self.hello: router_pb2.Hello | None = None
        self.known: set[bytes] = set()
        self.orders: list[router_pb2.EvictOrder] = []
        """Given to each member that joins."""
        self.evicted: list[int] = []
        """The numbers of the orders that were answered."""
        self.joined = 0

    async def Join(self, request_iterator: Any, context: Any) -> AsyncIterator[router_pb2.JoinResponse]:
        first = await anext(request_iterator)
        self.hello = first.hello
        self.joined += 1
        yield router_pb2.JoinResponse(welcome=router_pb2.Welcome(router_id="fake"))
        for order in self.orders:
            yield router_pb2.JoinResponse(evict=order)
        try:
            async for request in request_iterator:
                if request.HasField("evicted"):
                    self.evicted.append(request.evicted.number)
                    continue
                assert request.blocks.tier == common_pb2.TIER_HOST
                apply(self.known, request.blocks)
        finally:
            self.hello = None

    def Plan(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError

    def Watch(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


@asynccontextmanager
async def fake_router(address: str = "127.0.0.1:0") -> AsyncIterator[tuple[FakeRouter, str]]:
    router = FakeRouter()
    async with serve(
        address, lambda server: router_pb2_grpc.add_RouterServicer_to_server(router, server), [], grace=0
    ) as server:
        yield router, f"127.0.0.1:{server.port}"


async def test_the_router_is_told_everything_and_again_after_its_restart() -> None:
    blocks = puts(5)
    async with fake_router() as (first, address):
        async with open_kvstore(settings(router=address)) as store, raw(store.address) as one:
            await one.attach()
            await eventually(lambda: first.hello)
            hello = first.hello
            assert hello is not None
            assert (hello.role, hello.address, hello.host_id) == (router_pb2.ROLE_KVSTORE, store.address, HOST)
            await one.commit(blocks[:3], (await one.reserve(blocks[:3])).blocks)
            await eventually(lambda: first.known == set(keys(3)))
        await eventually(lambda: first.hello is None)


async def test_an_eviction_that_fails_is_not_answered_and_disturbs_nobody() -> None:
    async with fake_router() as (router, address):
        names = [b"too short", b"t" * 16]
        router.orders = [router_pb2.EvictOrder(number=number, namespace=name) for number, name in enumerate(names)]
        async with open_kvstore(settings(router=address)):
            await eventually(lambda: router.evicted)
            assert (router.evicted, router.joined) == ([1], 1)


async def test_a_store_finds_its_router_again() -> None:
    blocks = puts(5)
    async with fake_router() as (_, address):
        pass
    async with open_kvstore(settings(router=address)) as store, raw(store.address) as one:
        await one.attach()
        await one.commit(blocks[:3], (await one.reserve(blocks[:3])).blocks)
        for expected in (3, 5):
            async with fake_router(address) as (router, _):
                await eventually(lambda router=router: router.hello)
                if expected == 5:
                    await one.commit(blocks[3:], (await one.reserve(blocks[3:])).blocks)
                await eventually(lambda router=router, expected=expected: router.known == set(keys(expected)))


@pytest.mark.parametrize("blocks", [0, 3])
async def test_a_change_of_spec_is_a_new_snapshot(blocks: int) -> None:
    async with open_kvstore(settings()) as store, raw(store.address) as one, raw(store.address) as two:
        await one.attach()
        if blocks:
            await one.commit(puts(blocks), (await one.reserve(puts(blocks))).blocks)
        events = two.stub.Events(kvstore_pb2.EventsRequest())
        two.calls.append(events)
        assert len((await events.read()).stored) == blocks
        one.calls[0].cancel()
        await eventually(lambda: store.stats().attachments == 0)
        await two.attach(spec(dtype="bfloat16"))
        change = await events.read()
        assert change.snapshot and not change.stored
        assert ROOT not in change.stored
