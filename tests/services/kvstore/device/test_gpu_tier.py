"""The device tier of a store, over real sockets and a twin of a device: what is used goes up, and is right."""

from __future__ import annotations

import asyncio

import pytest
from tests.services.kvstore.device.helpers import TWIN, bench
from tests.services.kvstore.helpers import BLOCK_BYTES, HOST, ROOT, client_of, eventually, keys, puts, settings, spec

from penstock.kv.client.client import BlockPut
from penstock.kv.device.cuda import open_cuda
from penstock.kv.device.memory import NoDevice
from penstock.kv.hint import ReturnHint
from penstock.kv.identity import block_keys, namespace, root_key
from penstock.kvstore.service import open_kvstore
from penstock.runtime.config import ConfigError
from penstock.testing.twin import TwinDevice
from penstock.v1 import common_pb2, kvstore_pb2


def data(count: int, chain: str = "a") -> list[bytes]:
    return [bytes(put.data) for put in puts(count, chain)]


async def test_what_is_used_goes_up_and_comes_back_when_only_the_device_has_it() -> None:
    async with bench(blocks=16) as it:
        await it.client.put(puts(6))
        assert await it.read(keys(6)) == (data(6), ["host"] * 6)
        await eventually(lambda: not it.gpu.working)
        assert it.stats.blocks == 0, "used once, by nobody in particular"
        await it.read(keys(4), "c")
        await eventually(lambda: it.stats.promoted == 4)
        await it.flood()
        assert it.host(keys(6)) == 0
        assert await it.client.lookup(keys(6)) == 4
        assert await it.read(keys(6)) == (data(4), ["gpu"] * 4)
        assert await it.read(keys(6)) == (data(4), ["host"] * 4), "it is in both tiers now"
        stats = it.stats
        assert (stats.supplied, stats.blocks, stats.used_bytes) == (4, 4, 4 * BLOCK_BYTES)
        assert (stats.failed_copies, stats.corrupt, stats.off) == (0, 0, 0)


async def test_a_full_device_makes_room_and_keeps_what_is_only_there() -> None:
    async with bench(blocks=40, device_blocks=16) as it:
        await it.only_on_device(8, "old")
        await it.promoted(16, "new")
        stats = it.stats
        assert (stats.blocks, stats.demoted, stats.evictions) == (16, 8, 8)
        assert it.host(keys(8, "old")) == 8, "the only copies came down"
        assert await it.read(keys(8, "old")) == (data(8, "old"), ["host"] * 8)


async def test_room_for_blocks_is_not_made_of_those_before_them() -> None:
    """Also where the policy would rather evict these: without its beginning no reader finds a chain."""
    async with bench(blocks=64, device_blocks=16) as it:
        await it.promoted(10, "old")
        await it.promoted(6, "new")
        first = it.gpu.find_block(keys(1, "new")[0])
        assert first is not None
        it.gpu.expect_session(first.session, ReturnHint(ended=True))
        await it.client.put(puts(16, "new"))
        await it.read(keys(16, "new"), "session new")
        await eventually(lambda: it.gpu.has_blocks(keys(16, "new")) == 16)


async def test_a_chain_that_is_larger_than_the_device_has_its_beginning_there() -> None:
    async with bench(blocks=64, device_blocks=16) as it:
        await it.promoted(6)
        await it.warm(40)
        await eventually(lambda: not it.gpu.working)
        assert it.gpu.has_blocks(keys(40)) == 16


async def test_a_device_copy_of_what_the_host_has_is_just_dropped() -> None:
    async with bench(blocks=64, device_blocks=16) as it:
        await it.promoted(16, "old")
        await it.promoted(8, "new")
        stats = it.stats
        assert (stats.blocks, stats.demoted, stats.evictions) == (16, 0, 8)
        assert it.host(keys(16, "old")) == 16
        assert it.gpu.has_blocks(keys(16, "old")) == 8, "the end of the chain went, not its beginning"


async def test_events_follow_a_block_to_the_nearest_tier() -> None:
    gpu, host = common_pb2.TIER_GPU, common_pb2.TIER_HOST
    async with bench(blocks=16) as it:
        call = it.one.stub.Events(kvstore_pb2.EventsRequest())
        assert (await call.read()).snapshot
        where: dict[bytes, int] = {}

        async def follow() -> None:
            while True:
                change = await call.read()
                where.update(dict.fromkeys(change.stored, change.tier))
                for key in change.removed:
                    del where[key]

        following = asyncio.create_task(follow())
        await it.client.put(puts(2))
        await eventually(lambda: [where.get(key) for key in keys(2)] == [host, host])
        await it.read(keys(2), "c")
        await eventually(lambda: [where.get(key) for key in keys(2)] == [gpu, gpu])
        await it.flood()
        assert it.host(keys(2)) == 0
        await eventually(lambda: len(where) == 18 and where[keys(1)[0]] == gpu)
        it.switch.lose()
        await it.read(keys(2))
        await eventually(lambda: where and not set(keys(2)) & set(where))
        following.cancel()
        call.cancel()


async def test_a_failed_copy_leaves_the_block_where_it_was() -> None:
    async with bench(blocks=16) as it:
        it.switch.fail()
        await it.warm(3)
        await eventually(lambda: it.stats.failed_copies == 1)
        await eventually(lambda: not it.gpu.working)
        assert (it.stats.blocks, it.stats.used_bytes) == (0, 0)
        assert await it.read(keys(3), "c") == (data(3), ["host"] * 3)
        await eventually(lambda: it.stats.promoted == 3)
        await it.flood()
        it.switch.fail()
        assert await it.read(keys(3)) == ([], [])
        assert (it.store.stats().reserved, it.stats.failed_copies, it.stats.blocks) == (0, 2, 3)
        assert await it.read(keys(3)) == (data(3), ["gpu"] * 3)


async def test_a_copy_that_failed_on_its_way_down_is_not_the_end_of_the_block() -> None:
    async with bench(blocks=40, device_blocks=16) as it:
        await it.only_on_device(16, "old")
        it.switch.fail()
        await it.warm(1, "new")
        await eventually(lambda: it.stats.failed_copies == 1)
        await eventually(lambda: not it.gpu.working)
        assert it.gpu.has_blocks(keys(16, "old")) == 16
        assert it.gpu.has_blocks(keys(1, "new")) == 0
        await it.promoted(1, "new")
        assert (it.stats.demoted, it.stats.blocks) == (1, 16)


async def test_a_bit_that_flips_on_the_way_up_is_seen() -> None:
    async with bench() as it:
        it.switch.flip()
        await it.warm(3)
        await eventually(lambda: it.stats.promoted == 2)
        await eventually(lambda: not it.gpu.working)
        assert (it.stats.corrupt, it.stats.blocks) == (1, 2)
        assert it.store.stats().quarantined == 0, "the source is right"
        assert await it.read(keys(3)) == (data(3), ["host"] * 3)


async def test_a_block_that_was_wrong_in_host_memory_is_not_spread() -> None:
    async with bench() as it:
        await it.one.attach()
        memory = it.one.map()
        await it.client.put(puts(3))
        lease = await it.one.lease(keys(3))
        memory.block(lease.offsets[1], lease.length)[77] ^= 1
        request = kvstore_pb2.LeaseRequest(attachment_id=it.one.attached.attachment_id, keys=keys(3), session="c")
        await it.one.stub.Lease(request)
        await eventually(lambda: it.store.stats().quarantined == 1)
        await eventually(lambda: not it.gpu.working)
        assert (it.stats.corrupt, it.gpu.has_blocks(keys(3))) == (1, 1)
        assert await it.client.lookup(keys(3)) == 1


async def test_a_block_that_changed_on_the_device_is_never_served() -> None:
    async with bench(blocks=16) as it:
        await it.only_on_device(3)
        place = it.gpu.blocks.place()
        assert place is not None
        opened = TwinDevice().open(place.handle, place.arena_bytes)
        wrong = opened._memory[BLOCK_BYTES + 5 : BLOCK_BYTES + 6]
        wrong[0] ^= 1
        assert await it.read(keys(3)) == (data(1), ["gpu"])
        assert (it.stats.corrupt, it.stats.blocks) == (1, 2)
        assert await it.client.lookup(keys(3)) == 1
        assert it.store.stats().quarantined == 0


async def test_a_lost_device_turns_the_tier_off_and_the_store_goes_on() -> None:
    async with bench(blocks=16) as it:
        await it.only_on_device(3)
        it.switch.lose()
        assert await it.read(keys(3)) == ([], [])
        assert it.stats.off == 1 and "lost" in it.gpu.blocks.off
        assert await it.client.lookup(keys(3)) == 0
        assert await it.client.put(puts(3)) == 3
        for _ in range(3):
            assert await it.read(keys(3)) == (data(3), ["host"] * 3)
        assert (it.stats.blocks, it.gpu.blocks.place()) == (0, None)
        assert (await it.one.stats()).gpu.off == 1
        assert b"penstock_store_gpu_off 1.0" in it.store.metrics.text()


async def test_a_device_that_keeps_failing_turns_the_tier_off() -> None:
    async with bench() as it:
        it.switch.fail(100)
        await it.client.put(puts(1))
        for _ in range(20):
            await it.read(keys(1), "c")
            await eventually(lambda: not it.gpu.working)
        assert (it.stats.off, it.stats.failed_copies) == (1, 8)


async def test_a_slow_device_holds_nobody_up_who_does_not_need_it() -> None:
    async with bench(blocks=40) as it:
        it.switch.hold()
        await it.warm(3)
        await eventually(it.switch.stalled)
        await it.client.put(puts(20, "b"))
        assert await it.read(keys(20, "b")) == (data(20, "b"), ["host"] * 20)
        assert await it.read(keys(3)) == (data(3), ["host"] * 3)
        assert it.stats.blocks == 0, "nothing is findable before it is whole"
        it.switch.release()
        await eventually(lambda: it.stats.promoted == 3)


async def test_the_host_slot_of_a_copy_under_way_is_not_reused() -> None:
    """Also when its lease is long over, and everybody else wants the room."""
    async with bench(blocks=16) as it:
        it.switch.piece_bytes = 1000
        it.switch.hold(after=2)
        await it.warm(3)
        await eventually(it.switch.stalled)
        await eventually(lambda: it.store.stats().leases == 0)
        assert await it.client.put(puts(16, "b")) == 13
        it.switch.release()
        await eventually(lambda: it.stats.promoted == 3)
        assert it.stats.corrupt == 0
        await it.flood()
        assert await it.read(keys(3)) == (data(3), ["gpu"] * 3)


async def test_a_lease_that_is_given_up_during_its_copy_leaves_nothing_behind() -> None:
    async with bench(blocks=16, bring_s=60) as it:
        await it.only_on_device(3)
        it.switch.hold()
        waiting = asyncio.create_task(it.read(keys(3)))
        await eventually(it.switch.stalled)
        assert it.store.stats().reserved == 3
        waiting.cancel()
        await eventually(waiting.done)
        await eventually(lambda: it.store.stats().leases == 0)
        assert it.store.stats().reserved == 3, "bytes still move into these slots"
        it.switch.release()
        await eventually(lambda: it.store.stats().reserved == 0)
        await eventually(lambda: not it.gpu.working)
        assert it.gpu.has_blocks(keys(3)) == 3
        assert await it.read(keys(3)) == (data(3), ["gpu"] * 3)


async def test_stopping_waits_for_the_copy_under_way() -> None:
    async with bench() as it:
        it.switch.hold()
        await it.warm(3)
        await eventually(it.switch.stalled)
        asyncio.get_running_loop().call_later(0.05, it.switch.release)


async def test_tenants_do_not_meet_on_the_device() -> None:
    """The same tokens: the tenant that stored them hits, in host memory and on the device; the other one misses."""

    def names(tenant: str) -> list[bytes]:
        root = root_key(spec(), namespace(b"server key", tenant))
        return block_keys(root, list(range(64)), 16)

    async with bench(blocks=16) as it:
        attachment = await it.one.attach(device=TWIN)
        mine, theirs = names("alice"), names("bob")
        parents = [ROOT, *mine]
        blocks = [
            BlockPut(key, parents[at], at * 16, put.data)
            for at, (key, put) in enumerate(zip(mine, puts(4), strict=True))
        ]
        await it.client.put(blocks)
        await it.read(mine, "alice's")
        await eventually(lambda: it.gpu.has_blocks(mine) == 4)
        await it.flood()
        assert (await it.client.lookup(mine), await it.client.lookup(theirs)) == (4, 0)
        for name, found in [(theirs, 0), (mine, 4)]:
            request = kvstore_pb2.LeaseRequest(attachment_id=attachment, keys=name, on_device=True)
            answer = await it.one.stub.Lease(request)
            assert (len(answer.device.offsets), len(answer.offsets)) == (found, 0)
        assert await it.read(theirs) == ([], [])
        assert await it.read(mine) == (data(4), ["gpu"] * 4)


async def test_another_model_finds_nothing_and_no_old_bytes() -> None:
    async with bench(blocks=16, cooling_s=0.01) as it:
        await it.only_on_device(4)
        other = spec(BLOCK_BYTES, model="ef" * 32)
        address = it.store.address
        it.client._link.close()
        await eventually(lambda: it.store.stats().attachments == 0)
        async with client_of(address, other, HOST) as client:
            await eventually(lambda: client.connected)
            assert await client.lookup(keys(4)) == 0
            assert (it.stats.blocks, it.stats.used_bytes) == (0, 0)


async def test_host_memory_is_pinned_once() -> None:
    async with bench() as it:
        await eventually(lambda: it.gpu.blocks._arena.registered == [it.config.host_bytes])


async def test_what_can_not_be_had_fails_at_the_start_with_what_could() -> None:
    def small(index: int) -> TwinDevice:
        return TwinDevice(index, total_bytes=(5 << 20) + 17)

    with pytest.raises(ConfigError, match="gpu_bytes = '8MiB': device 0 has 5MiB free; use less than that"):
        async with open_kvstore(settings(gpu_bytes=8 << 20), small):
            pass
    with pytest.raises(ConfigError, match="no device 3; 1 is visible, the first is 0; 0 does without"):
        async with open_kvstore(settings(gpu_bytes=1 << 20, gpu_device=3), small):
            pass
    try:
        open_cuda(0)
    except NoDevice:
        with pytest.raises(ConfigError, match=r"gpu_bytes = '1MiB': .*install penstock\[cuda13\]"):
            async with open_kvstore(settings(gpu_bytes=1 << 20)):
                pass
    with pytest.raises(ConfigError, match="gpu_bytes = '1KiB': 0, or at least 64KiB"):
        settings(gpu_bytes=1024)
    with pytest.raises(ConfigError, match="gpu_device = -1: 0 or more"):
        settings(gpu_device=-1)


async def test_without_a_device_nothing_is_loaded_for_one() -> None:
    async with open_kvstore(settings()) as store:
        assert store.gpu is None
        assert b"penstock_store_gpu_slots 0.0" in store.metrics.text()
