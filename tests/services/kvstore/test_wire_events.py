"""The event stream as a subscriber of another project reads it: plain ZeroMQ and msgpack, nothing of ours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from tests.services.kvstore.helpers import ROOT, FakeTier, client_of, join, keys, puts, settings, spec

from penstock.kv.events import Change
from penstock.kvstore.events.wire.format import Held, payload, removed, stored
from penstock.kvstore.events.wire.publisher import Publisher, Replay, Translator
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.kvstore.table.blocks import Block, TierKind
from penstock.kvstore.tiers.base import Room
from penstock.runtime.config import ConfigError

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: pip install penstock[events]")
zmq_asyncio = pytest.importorskip("zmq.asyncio")
LOOPBACK = "tcp://127.0.0.1:0"
END = 2**64 - 1


class Event(msgspec.Struct, tag=True):
    """As vLLM declares them, in our own words."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class OldStored(BlockStored, tag="BlockStored", array_like=True):
    """What the first element of an array is, is named by the tag."""


class OldRemoved(BlockRemoved, tag="BlockRemoved", array_like=True):
    pass


class OldCleared(AllBlocksCleared, tag="AllBlocksCleared", array_like=True):
    pass


class OldBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[OldStored | OldRemoved | OldCleared]
    data_parallel_rank: int | None = None


def hashes(names: list[bytes]) -> list[int]:
    return [int(name.hex()[-16:], 16) for name in names]


class Watcher:
    """What a router of another project would keep: hashes by medium."""

    def __init__(self, store: KvStore, topic: str = "") -> None:
        assert store.events is not None
        self.context = zmq_asyncio.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect(store.events.address)
        self.sub.subscribe(topic)
        self.req = self.context.socket(zmq.DEALER)  # a REQ socket would take one answer only
        if store.events.replay_address:
            self.req.connect(store.events.replay_address)
        self.last = -1
        self.held: dict[int, str | None] = {}
        self.events: list[Event] = []

    async def next(self) -> tuple[bytes, int, bytes]:
        async with asyncio.timeout(10):
            topic, sequence, batch = await self.sub.recv_multipart()
        assert len(sequence) == 8
        return topic, int.from_bytes(sequence, "big"), batch

    async def replay(self, since: int) -> list[tuple[int, bytes]]:
        got: list[tuple[int, bytes]] = []
        async with asyncio.timeout(10):
            await self.req.send_multipart([b"", since.to_bytes(8, "big")])
            while True:
                empty, sequence, batch = await self.req.recv_multipart()
                assert empty == b""
                if int.from_bytes(sequence, "big") == END:
                    assert batch == b""
                    return got
                got.append((int.from_bytes(sequence, "big"), batch))

    def apply(self, sequence: int, batch: bytes, kind: Any = Batch) -> None:
        assert sequence == self.last + 1, "a gap"
        self.last = sequence
        decoded = msgspec.msgpack.decode(batch, type=kind)
        assert abs(decoded.ts - time.time()) < 60
        for event in decoded.events:
            self.events.append(event)
            match event:
                case BlockStored():
                    assert event.token_ids == []
                    assert event.block_size == 16
                    self.held.update(dict.fromkeys(event.block_hashes, event.medium))
                case BlockRemoved():
                    for gone in event.block_hashes:
                        assert self.held.pop(gone) == event.medium
                case AllBlocksCleared():
                    self.held.clear()

    async def until(self, expected: set[int], kind: Any = Batch) -> None:
        """Reads on, filling gaps with replays, until exactly these are held."""
        while set(self.held) != expected:
            _, sequence, batch = await self.next()
            if sequence != self.last + 1:
                for number, missed in await self.replay(self.last + 1):
                    self.apply(number, missed, kind)
            if sequence == self.last + 1:
                self.apply(sequence, batch, kind)


@asynccontextmanager
async def watched(topic: str = "", **other: Any) -> AsyncIterator[tuple[KvStore, Watcher]]:
    options = {"events_address": LOOPBACK, "events_replay_address": LOOPBACK, "events_topic": topic}
    async with open_kvstore(settings(**(options | other))) as store:
        watcher = Watcher(store, topic)
        try:
            yield store, watcher
        finally:
            watcher.context.destroy(linger=0)


async def subscribed(watcher: Watcher, store: KvStore) -> None:
    """Returns when what is published now arrives: a subscription takes a moment to reach the publisher."""
    assert store.events is not None
    reading = asyncio.ensure_future(watcher.next())
    async with asyncio.timeout(10):
        while not reading.done():
            await store.events.publish([{"type": "AllBlocksCleared"}])
            await asyncio.wait([reading], timeout=0.01)
    watcher.last = reading.result()[1]


async def test_a_subscriber_sees_what_is_stored_and_what_is_evicted() -> None:
    async with watched(topic="kv", blocks=16) as (store, watcher), client_of(store.address) as client:
        await subscribed(watcher, store)
        await client.put(puts(10))
        await watcher.until(set(hashes(keys(10))))
        [event] = [event for event in watcher.events if isinstance(event, BlockStored)]
        assert event.block_hashes == hashes(keys(10)), "a chain is one event, in order"
        assert event.parent_block_hash is None
        assert set(watcher.held.values()) == {"CPU"}
        await client.put(puts(12)[10:])
        await watcher.until(set(hashes(keys(12))))
        last = watcher.events[-1]
        assert isinstance(last, BlockStored)
        assert last.parent_block_hash == hashes(keys(10))[-1], "a later part names the block before it"
        await client.put(puts(10, "b"))
        await watcher.until(set(hashes(keys(6) + keys(10, "b"))))


async def test_what_was_missed_is_replayed_in_order() -> None:
    async with watched() as (store, _), client_of(store.address) as client:
        await client.put(puts(4))  # long before anybody listens
        assert store.events is not None
        late = Watcher(store)
        try:
            await subscribed(late, store)
            missed = await late.replay(0)
            assert [number for number, _ in missed] == list(range(len(missed)))
            late.last = -1
            for number, batch in missed:
                late.apply(number, batch)
                if set(late.held) == set(hashes(keys(4))):
                    break
            else:
                pytest.fail("the replay does not hold what was stored")
            assert await late.replay(10**6) == []
        finally:
            late.context.destroy(linger=0)


async def test_a_replay_asked_for_in_nonsense_harms_nobody() -> None:
    async with watched() as (store, watcher), client_of(store.address) as client:
        assert store.events is not None
        rude = watcher.context.socket(zmq.DEALER)
        rude.connect(store.events.replay_address)
        for frames in ([b""], [b"", b"123"], [b"x", bytes(8)], [b"", bytes(8), bytes(8)], [b"", bytes(4096)]):
            await rude.send_multipart(frames)
        await client.put(puts(3))
        async with asyncio.timeout(10):
            while not any(b"BlockStored" in batch for _, batch in await watcher.replay(0)):
                pass


async def test_older_subscribers_get_arrays() -> None:
    async with watched(events_style="array", blocks=16) as (store, watcher), client_of(store.address) as client:
        await subscribed(watcher, store)
        await client.put(puts(16))
        await watcher.until(set(hashes(keys(16))), OldBatch)
        await client.put(puts(1, "b"))
        await watcher.until(set(hashes(keys(15) + keys(1, "b"))), OldBatch)


class Shelf(FakeTier):
    """A tier below memory that says where its blocks belong."""

    kind = TierKind.NVME

    def __init__(self) -> None:
        self.blocks: dict[bytes, Block] = {}

    def has_blocks(self, names: Sequence[bytes]) -> int:
        return next((at for at, name in enumerate(names) if name not in self.blocks), len(names))

    def stored_keys(self) -> Iterable[bytes]:
        return self.blocks

    def find_block(self, key: bytes) -> Block | None:
        return self.blocks.get(key)

    async def bring_blocks(self, names: Sequence[bytes], room: Room, until: float) -> int:
        return 0


async def test_blocks_of_slower_tiers_are_told_with_their_place() -> None:
    async with watched(blocks=16) as (store, watcher), client_of(store.address) as client:
        await subscribed(watcher, store)
        shelf = Shelf()
        join(store, shelf)
        await client.put(puts(16))
        await watcher.until(set(hashes(keys(16))))
        for name in keys(16):
            found = store.host.table.find(name)
            assert found is not None
            shelf.blocks[name] = found
        await client.put(puts(4, "b"))  # the last four of the chain have to go from memory, and stay on the shelf
        await watcher.until(set(hashes(keys(16) + keys(4, "b"))))
        async with asyncio.timeout(10):
            while list(watcher.held.values()).count("DISK") < 4:
                _, sequence, batch = await watcher.next()
                watcher.apply(sequence, batch)
        assert {name for name, medium in watcher.held.items() if medium == "DISK"} == set(hashes(keys(16)[12:]))
        gone = keys(16)[15]
        del shelf.blocks[gone]
        store.store.tiers.moved(TierKind.NVME, gone)
        await watcher.until(set(hashes(keys(15) + keys(4, "b"))))


async def test_another_model_clears_everything() -> None:
    async with watched() as (store, watcher):
        await subscribed(watcher, store)
        async with client_of(store.address) as client:
            await client.put(puts(3))
            await watcher.until(set(hashes(keys(3))))
        async with client_of(store.address, spec(model="ef" * 32)) as client:
            await client.put(puts(2, "b"))
            await watcher.until(set(hashes(keys(2, "b"))))
        assert AllBlocksCleared in [type(event) for event in watcher.events]


def test_the_bytes_are_those_that_vllm_sends() -> None:
    """Field order and names, spelled out."""
    parent, key = bytes(24) + bytes([255] * 8), bytes(31) + b"\x07"
    events = stored([Held(key, parent, 16, "CPU", 16)])
    assert msgspec.msgpack.decode(payload(1.5, events, "map")) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [7],
                "parent_block_hash": 2**64 - 1,
                "token_ids": [],
                "block_size": 16,
                "lora_id": None,
                "medium": "CPU",
                "lora_name": None,
            }
        ],
        0,
    ]
    assert msgspec.msgpack.decode(payload(1.5, events, "array"))[1] == [
        ["BlockStored", [7], 2**64 - 1, [], 16, None, "CPU", None]
    ]
    assert msgspec.msgpack.decode(payload(1.5, removed([(key, "DISK")]), "array"))[1] == [["BlockRemoved", [7], "DISK"]]


def test_a_move_is_a_removal_and_a_store() -> None:
    where = {key: Held(key, ROOT, 0, "CPU", 16) for key in keys(2)}
    translator = Translator(where.get)
    translator.events(Change(stored=keys(2), snapshot=True))
    where[keys(2)[0]] = Held(keys(2)[0], ROOT, 0, "DISK", 16)
    events = translator.events(Change(stored=keys(2)))
    assert [(event["type"], event["block_hashes"], event["medium"]) for event in events] == [
        ("BlockRemoved", hashes(keys(1)), "CPU"),
        ("BlockStored", hashes(keys(1)), "DISK"),
    ]
    assert translator.events(Change(removed=[*keys(1), *keys(1, "never told")])) == removed([(keys(1)[0], "DISK")])


def test_the_replay_is_bounded() -> None:
    replay = Replay(batches=3, size=100)
    for number in range(10):
        replay.add(number, bytes(10))
    assert [number for number, _ in replay.since(0)] == [7, 8, 9]
    replay.add(10, bytes(90))
    assert [number for number, _ in replay.since(0)] == [9, 10]
    replay.add(11, bytes(101))
    assert replay.since(0) == []


@pytest.mark.parametrize("address", ["127.0.0.1:5557", "tcp://*:5557", "tcp://:1", "tcp://127.0.0.1:x", "ipc:///x:1"])
def test_an_address_that_says_too_little_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="events_address"):
        settings(events_address=address)


async def test_an_address_that_is_taken_is_named() -> None:
    async with watched() as (store, _):
        assert isinstance(store.events, Publisher)
        with pytest.raises(ConfigError, match="can't listen"):
            async with open_kvstore(settings(events_address=store.events.address)):
                pass
