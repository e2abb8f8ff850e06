"""Blocks of several specs in one store, over real sockets: side by side, apart, and each as in a store of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from tests.services.kvstore.helpers import (
    BLOCK_BYTES,
    HOST,
    client_of,
    eventually,
    keys,
    puts,
    raw,
    read,
    refusal,
    settings,
    spec,
)

from penstock.kv.client.client import Origin, StoreClient
from penstock.kv.pace import Pace, pace_to_message
from penstock.kv.spec import KvSpec
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.kvstore.tiers.device.tier import DeviceTier
from penstock.runtime.config import ConfigError
from penstock.testing.twin import TwinDevice
from penstock.v1 import common_pb2, kvstore_pb2

SMALL, LARGE, THIRD = spec(), spec(2 * BLOCK_BYTES, model="ef" * 32), spec(model="01" * 32)
BLOCKS = 32
"""Of SMALL, in its share."""


def shared(partitions: int = 2, **other: Any) -> KvStoreConfig:
    """A store whose partitions are as large as a store of `BLOCKS` small blocks."""
    alone = settings(BLOCKS)
    return replace(alone, host_bytes=partitions * alone.host_bytes, partitions=partitions, **other)


def data(count: int, chain: str, of: KvSpec) -> list[bytes]:
    return [bytes(put.data) for put in puts(count, chain, of.block_bytes)]


async def put(client: StoreClient, count: int, chain: str, of: KvSpec) -> int:
    return await client.put(puts(count, chain, of.block_bytes))


@asynccontextmanager
async def both(store: KvStore) -> AsyncIterator[tuple[StoreClient, StoreClient]]:
    async with client_of(store.address, SMALL) as small, client_of(store.address, LARGE) as large:
        yield small, large


def held(directory: Path) -> int:
    """Bytes of all slabs."""
    return sum(file.stat().st_size for file in directory.glob("*/slab-*.blocks"))


def partition(stats: kvstore_pb2.StatsResponse, of: KvSpec) -> kvstore_pb2.PartitionStats:
    [found] = [one for one in stats.partitions if one.spec.model == of.model]
    return found


async def test_each_client_finds_the_blocks_of_its_spec() -> None:
    async with open_kvstore(shared()) as store, raw(store.address) as one, both(store) as (small, large):
        assert (await put(small, 5, "s", SMALL), await put(large, 4, "l", LARGE)) == (5, 4)
        assert await read(small, keys(5, "s")) == data(5, "s", SMALL)
        assert await read(large, keys(4, "l")) == data(4, "l", LARGE)
        assert (await one.lookup(keys(9, "s")), await one.lookup(keys(9, "l"))) == (5, 4)
        async with client_of(store.address, LARGE, "elsewhere") as far:  # streamed both ways
            assert await put(far, 3, "far", LARGE) == 3
            assert await read(far, keys(3, "far")) == data(3, "far", LARGE)
        stats = await one.stats()
        assert (stats.blocks, stats.attachments, stats.slots) == (12, 2, BLOCKS + partition(stats, LARGE).slots)
        assert [partition(stats, of).blocks for of in (SMALL, LARGE)] == [5, 7]
        assert stats.arena_bytes == shared().host_bytes
        assert store.figures()["blocks"] == 12


async def test_what_is_not_of_ones_own_spec_is_not_found() -> None:
    """Nor can an attachment touch what belongs to another one's partition."""
    async with open_kvstore(shared()) as store, raw(store.address) as one, raw(store.address) as two:
        await one.attach(SMALL)
        await two.attach(LARGE)
        await one.commit(puts(2), (await one.reserve(puts(2))).blocks)
        assert not (await two.lease(keys(2))).offsets
        assert len((await one.lease(keys(2))).offsets) == 2
        with pytest.raises(grpc.aio.AioRpcError, match="8192"):
            await two.reserve(puts(1, "x"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.lease(keys(2), attachment="nobody's")
        assert refusal(caught.value)[0] == "NOT_FOUND"


@pytest.mark.parametrize("seed", range(4))
async def test_each_is_as_in_a_store_of_its_own(seed: int) -> None:
    """The reference: a store with the bytes of one share, for that model alone. Whatever the others do besides."""
    random = Random(seed)
    config = shared(eviction="lru")
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_kvstore(config))
        alone = {of: await stack.enter_async_context(open_kvstore(config.share())) for of in (SMALL, LARGE)}
        ours = {of: await stack.enter_async_context(client_of(store.address, of)) for of in alone}
        theirs = {of: await stack.enter_async_context(client_of(alone[of].address, of)) for of in alone}
        for _ in range(150):
            of, chain, count = random.choice([SMALL, LARGE]), f"c{random.randrange(6)}", random.randrange(1, 12)
            name = f"{of.model[:2]}{chain}"
            if random.random() < 0.5:
                assert await put(ours[of], count, name, of) == await put(theirs[of], count, name, of)
            else:
                found = [await leased(client, keys(count, name)) for client in (ours[of], theirs[of])]
                assert found[0] == found[1] == data(len(found[0]), name, of)
        assert store.stats().evictions == sum(one.stats().evictions for one in alone.values()) > 0


def has(tier: DeviceTier, names: Sequence[bytes]) -> bool:
    return tier.has_blocks(names) == len(names)


async def leased(client: StoreClient, names: Sequence[bytes]) -> list[bytes]:
    async with client.lease(names) as found:
        return [bytes(view) for view in found.blocks]


async def test_the_flood_of_one_evicts_nothing_of_the_other() -> None:
    async with open_kvstore(shared()) as store, raw(store.address) as one, both(store) as (small, large):
        await put(small, BLOCKS, "s", SMALL)
        for number in range(20):
            await put(large, 8, f"flood{number}", LARGE)
        assert await read(small, keys(BLOCKS, "s")) == data(BLOCKS, "s", SMALL)
        stats = await one.stats()
        assert partition(stats, SMALL).evictions == 0 < partition(stats, LARGE).evictions


async def test_metrics_tell_partitions_apart_by_numbers_that_stay() -> None:
    def told(store: KvStore, what: str, **labels: str) -> float | None:
        return store.metrics.registry.get_sample_value(f"penstock_store_partition_{what}", labels)

    def owners(store: KvStore) -> set[tuple[str, str]]:
        families = store.metrics.registry.collect()
        samples = [one for family in families for one in family.samples]
        models = [one.labels for one in samples if one.name == "penstock_store_partition_model"]
        return {(labels["partition"], labels["model_name"]) for labels in models}

    async with open_kvstore(shared()) as store:
        assert owners(store) == set()
        assert [told(store, "blocks", partition=number) for number in "012"] == [0, 0, None]
        async with client_of(store.address, SMALL) as small:
            await put(small, 3, "s", SMALL)
            async with client_of(store.address, LARGE) as large:
                await put(large, 2, "l", LARGE)
                assert len(await leased(small, keys(4, "s"))) == 3
                assert owners(store) == {("0", SMALL.model), ("1", LARGE.model)}
                assert [told(store, "slots", partition=number) for number in "01"] == [BLOCKS, BLOCKS // 2]
                assert [told(store, "blocks", partition=number) for number in "01"] == [3, 2]
                assert [told(store, "hits_total", partition=number) for number in "01"] == [3, 0]
                assert [told(store, "attachments", partition=number) for number in "01"] == [1, 1]
            async with client_of(store.address, THIRD):
                assert owners(store) == {("0", SMALL.model), ("1", THIRD.model)}, "no series of who has left"
                assert [told(store, "blocks", partition=number) for number in "01"] == [3, 0]


async def test_a_third_spec_waits_until_one_has_no_clients_and_takes_the_longest_unused() -> None:
    async with open_kvstore(shared()) as store, raw(store.address) as one:
        async with client_of(store.address, LARGE) as large:
            async with client_of(store.address, SMALL) as small:
                await put(small, 3, "s", SMALL)
                await put(large, 3, "l", LARGE)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await one.attach(replace(THIRD, dtype="int8"))
                code, text = refusal(caught.value)
                assert code == "FAILED_PRECONDITION"
                assert text.startswith(
                    "all 2 partitions of the store are in use with other KV specs, and of the nearest"
                )
                assert f"model is '{SMALL.model}' here" in text
            await eventually(lambda: store.stats().attachments == 1)
            await one.attach(THIRD)
            assert (await one.lookup(keys(3, "s")), await one.lookup(keys(3, "l"))) == (0, 3)
            assert await read(large, keys(3, "l")) == data(3, "l", LARGE)
        await eventually(lambda: store.stats().attachments == 1)
        one.calls[-1].cancel()
        await eventually(lambda: store.stats().attachments == 0)
        await one.attach(SMALL)
        assert await one.lookup(keys(3, "l")) == 0, "that of LARGE was unused for longer"
        assert {one.spec.model for one in (await one.stats()).partitions} == {SMALL.model, THIRD.model}


async def test_the_bound_on_clients_is_of_all_partitions() -> None:
    async with open_kvstore(shared(max_clients=2)) as store, raw(store.address) as one:
        await one.attach(SMALL)
        await one.attach(LARGE)
        with pytest.raises(grpc.aio.AioRpcError, match="2 clients are attached already"):
            await one.attach(SMALL)


async def test_subscribers_hear_of_all() -> None:
    async with open_kvstore(shared()) as store, raw(store.address) as one, both(store) as (small, large):
        await put(small, 2, "s", SMALL)
        await put(large, 2, "l", LARGE)
        call = one.stub.Events(kvstore_pb2.EventsRequest())
        first = await call.read()
        assert (first.snapshot, first.tier) == (True, common_pb2.TIER_HOST)
        assert set(first.stored) == {*keys(2, "s"), *keys(2, "l")}
        await put(large, 3, "l", LARGE)
        assert list((await call.read()).stored) == keys(3, "l")[2:]
        call.cancel()


async def test_both_are_found_again_after_a_restart(tmp_path: Path) -> None:
    disk: dict[str, Any] = {"nvme_dir": tmp_path, "nvme_bytes": 16 << 20, "bring_s": 5.0}
    async with open_kvstore(shared(**disk)) as store, both(store) as (small, large):
        await put(small, 6, "s", SMALL)
        await put(large, 5, "l", LARGE)
    for _ in range(2):
        async with open_kvstore(shared(**disk)) as store, raw(store.address) as one:
            assert (await one.lookup(keys(6, "s")), await one.lookup(keys(5, "l"))) == (6, 5), "before any client"
            async with both(store) as (small, large):
                assert await read(large, keys(5, "l"), "nvme") == data(5, "l", LARGE)
                assert await read(small, keys(6, "s"), "nvme") == data(6, "s", SMALL)
                assert (await one.stats()).nvme.blocks == 11
    async with open_kvstore(replace(shared(**disk), partitions=1)) as store:
        for of, count, chain in ((LARGE, 5, "l"), (SMALL, 6, "s")):
            async with client_of(store.address, of) as client:
                async with asyncio.timeout(15):  # its space opens in the background
                    while await leased(client, keys(count, chain)) != data(count, chain, of):
                        pass
            await eventually(lambda: store.stats().attachments == 0)


async def test_on_the_disk_one_model_takes_nothing_of_the_others_share(tmp_path: Path) -> None:
    disk: dict[str, Any] = {"nvme_dir": tmp_path, "nvme_bytes": 2 << 20, "bring_s": 5.0}
    async with open_kvstore(shared(**disk)) as store, raw(store.address) as one, both(store) as (small, large):
        await put(small, 10, "s", SMALL)
        await one.settle(lambda stats: stats.nvme.blocks == 10 or not stats.nvme.pending)
        for number in range(30):
            await put(large, 8, f"flood{number}", LARGE)
            await read(large, keys(8, f"flood{number}"))
    async with open_kvstore(shared(**disk)) as store, raw(store.address) as one:
        assert await one.lookup(keys(10, "s")) == 10
        assert held(tmp_path) <= 2 << 20


async def test_a_store_that_takes_over_a_larger_one_keeps_within_its_bytes(tmp_path: Path) -> None:
    """A directory that one partition had filled, now shared by two."""
    disk: dict[str, Any] = {"nvme_dir": tmp_path, "nvme_bytes": 2 << 20, "bring_s": 5.0}
    async with open_kvstore(replace(shared(**disk), partitions=1, host_bytes=4 << 20)) as store:
        async with client_of(store.address, SMALL) as small:
            for number in range(12):
                await put(small, 32, f"s{number}", SMALL)
                await read(small, keys(32, f"s{number}"))
    async with open_kvstore(shared(**disk)) as store, both(store) as (small, large):
        await put(large, 8, "l", LARGE)
    assert 0 < held(tmp_path) <= 2 << 20
    async with open_kvstore(shared(**disk)) as store, raw(store.address) as one:
        assert await one.lookup(keys(8, "l")) == 8


async def test_another_store_pulls_blocks_of_both() -> None:
    async with open_kvstore(shared()) as there, both(there) as (small, large):
        await put(small, 4, "s", SMALL)
        await put(large, 4, "l", LARGE)
        config = shared(host_id="here", peers=(there.address,), bring_s=10.0)
        async with open_kvstore(config) as here, AsyncExitStack() as stack:
            for of, chain in ((SMALL, "s"), (LARGE, "l")):
                client = await stack.enter_async_context(client_of(here.address, of, "here"))
                async with client.lease(keys(4, chain), Origin(sources=(there.address,))) as found:
                    assert [bytes(view) for view in found.blocks] == data(4, chain, of)
                    assert found.tiers == ["remote"] * 4
            assert here.figures()["pulled_blocks"] == 8


async def test_a_store_waits_for_what_clients_of_each_compute() -> None:
    pace = pace_to_message(Pace(queue_s=0.0, block_s=5.0, growth_s=0.0, step_blocks=1))
    async with open_kvstore(shared()) as store, raw(store.address) as one, both(store):
        attachment = await one.attach(LARGE)
        claim = kvstore_pb2.ClaimRequest(attachment_id=attachment, number=1, keys=keys(1, "l"), pace=pace)
        assert (await one.stub.Claim(claim)).wait == kvstore_pb2.ClaimResponse.WAIT_NONE
        peer = one.stub.Claim(kvstore_pb2.ClaimRequest(keys=keys(1, "l"), pace=pace, peer=True))
        await eventually(lambda: store.figures()["claim_waits"] == 1)
        blocks = puts(1, "l", LARGE.block_bytes)
        await one.commit(blocks, (await one.reserve(blocks)).blocks)
        answer = await peer
        assert (answer.found, answer.wait) == (1, kvstore_pb2.ClaimResponse.WAIT_STORED)


async def test_each_has_a_share_of_the_device() -> None:
    config = shared(gpu_bytes=2 * 16 * BLOCK_BYTES)
    async with open_kvstore(config, TwinDevice) as store, both(store) as (small, large):
        for client, of, chain, count in ((small, SMALL, "s", 16), (large, LARGE, "l", 8)):
            await put(client, count, chain, of)
            async with client.lease(keys(count, chain), Origin(f"session {chain}")):
                pass
            [part] = [one for one in store.partitions if one.store.spec == of]
            await eventually(
                lambda part=part, count=count, chain=chain: part.gpu.has_blocks(keys(count, chain)) == count
            )
        assert store.device_figures()["blocks"] == 24
        async with client_of(store.address, LARGE, HOST, device=TwinDevice()) as near:
            async with near.lease(keys(8, "l"), on_device=True) as found:
                assert len(found.on_device.views) == 8


DRAFT = spec(BLOCK_BYTES // 2, model="dd" * 32)


def with_drafts(partitions: int = 1, **other: Any) -> KvStoreConfig:
    """With memory for 64 blocks of DRAFT in each partition for drafts."""
    return shared(partitions, draft_bytes=partitions * settings(BLOCKS).host_bytes, **other)


async def test_a_draft_model_has_memory_of_its_own(tmp_path: Path) -> None:
    """It takes nothing from the models, in whichever order they come; and nobody else hears of its blocks."""
    disk: dict[str, Any] = {"nvme_dir": tmp_path, "nvme_bytes": 16 << 20}
    async with open_kvstore(with_drafts(**disk)) as store, raw(store.address) as one, AsyncExitStack() as stack:
        draft = await stack.enter_async_context(client_of(store.address, DRAFT, draft=True))
        small = await stack.enter_async_context(client_of(store.address, SMALL))
        call = one.stub.Events(kvstore_pb2.EventsRequest())
        assert (await call.read()).snapshot
        await put(small, BLOCKS, "s", SMALL)
        for number in range(20):
            await put(draft, 8, f"flood{number}", DRAFT)
        assert await read(small, keys(BLOCKS, "s")) == data(BLOCKS, "s", SMALL)
        assert await read(draft, keys(8, "flood19")) == data(8, "flood19", DRAFT)
        stats = await one.stats()
        assert partition(stats, SMALL).evictions == 0 < partition(stats, DRAFT).evictions
        assert (stats.blocks, stats.slots, stats.attachments) == (BLOCKS, BLOCKS, 1), "of the models"
        assert stats.spec.model == SMALL.model
        heard: set[bytes] = set()
        while len(heard) < BLOCKS:
            heard |= set((await call.read()).stored)
        assert heard == set(keys(BLOCKS, "s"))
        call.cancel()
    async with open_kvstore(with_drafts(**disk)) as store, raw(store.address) as one:
        assert await one.lookup(keys(8, "flood19")) == 0, "not on the disk"


async def test_drafts_and_models_never_take_each_others_partition() -> None:
    async with open_kvstore(with_drafts(2)) as store, raw(store.address) as one:
        for of in (DRAFT, replace(DRAFT, dtype="int8")):
            await one.attach(of, draft=True)
        with pytest.raises(grpc.aio.AioRpcError, match="all 2 partitions of the store are in use"):
            await one.attach(replace(DRAFT, dtype="bfloat16"), draft=True)
        for of in (DRAFT, SMALL):
            await one.attach(of)
        with pytest.raises(grpc.aio.AioRpcError, match="all 2 partitions of the store are in use"):
            await one.attach(LARGE)
        assert [part.draft for part in sorted(store.partitions, key=lambda part: part.number)] == [0, 0, 1, 1]


async def test_a_store_without_memory_for_drafts_refuses_them() -> None:
    async with open_kvstore(shared()) as store, raw(store.address) as one:
        with pytest.raises(grpc.aio.AioRpcError, match="keeps no blocks of draft models; one with --draft-bytes does"):
            await one.attach(DRAFT, draft=True)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"partitions": 0}, "partitions"),
        ({"partitions": 65}, "partitions"),
        ({"partitions": 64, "host_bytes": 1 << 20}, "fewer: of each share, host_bytes"),
        ({"draft_bytes": 1}, "draft_bytes"),
        ({"partitions": 64, "draft_bytes": 1 << 18}, "fewer: of each share, draft_bytes"),
        ({"partitions": 2, "mooncake_master": "127.0.0.1:1"}, "1 with a Mooncake pool"),
    ],
)
def test_partitions_that_can_not_be(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        KvStoreConfig(**wrong)
