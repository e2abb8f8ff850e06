"""Blocks from the store of another host over a bad way, and none."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.services.kvstore.helpers import client_of, eventually, keys, puts, raw, spec
from tests.services.kvstore.two import contents, two

from penstock.kv.client.client import Origin
from penstock.v1 import common_pb2, kvstore_pb2

MIB = 1 << 20


@pytest.mark.parametrize("fault", ["reset", "stall"])
async def test_a_broken_stream_is_taken_up_where_it_broke(fault: str) -> None:
    """Each byte crosses the network once, but for what was under way."""
    size, count = MIB, 12
    async with two(size, 16) as mesh:
        blocks = puts(count, block_bytes=size)
        await mesh.writer.put(blocks)
        relay = mesh.relay

        def break_it() -> None:
            if fault == "reset":
                relay.reset()
            else:  # half-open: the connections stay, nothing passes; fresh ones do
                relay.stall()
                asyncio.get_running_loop().call_later(0.4, relay.heal)

        relay.cut = break_it  # type: ignore[method-assign]
        relay.cut_at = 5 * size + 300_000
        assert await mesh.lease(keys(count)) == contents(blocks)
        assert mesh.figures["resumptions"] == 1
        assert mesh.figures["resumed_bytes"] >= 2 * size
        assert mesh.figures["pulled_bytes"] == count * size, "nothing was received twice"
        assert relay.down < (count + 5) * size
        assert mesh.faults == {}
        assert mesh.first.stats().quarantined == mesh.second.stats().quarantined == 0


async def test_a_long_way_with_many_resets() -> None:
    size, count = MIB, 12
    async with two(size, 16) as mesh:
        blocks = puts(count, block_bytes=size)
        await mesh.writer.put(blocks)
        relay = mesh.relay
        relay.delay_s = 0.002

        def again() -> None:
            relay.reset()
            relay.cut_at = relay.down + 3 * size

        relay.cut = again  # type: ignore[method-assign]
        relay.cut_at = 2 * size
        assert await mesh.lease(keys(count)) == contents(blocks)
        assert mesh.figures["resumptions"] >= 3
        assert mesh.figures["pulled_bytes"] == count * size


async def test_a_pull_that_outlives_its_lease_takes_another() -> None:
    """What was leased may be evicted by then: the bytes are right, or they are not there."""
    size, count = MIB, 12
    async with two(size, 16, lease_s=0.1) as mesh:
        blocks = puts(count, block_bytes=size)
        await mesh.writer.put(blocks)
        mesh.relay.delay_s = 0.004
        leasing = asyncio.ensure_future(mesh.lease(keys(count)))
        await eventually(lambda: mesh.figures["pulled_blocks"] >= 2)
        storm = 0
        while not leasing.done():
            storm += 1
            await mesh.writer.put(puts(3, f"storm{storm}", size))
        found = await leasing
        assert len(found) >= 2
        assert found == contents(blocks[: len(found)])
        assert mesh.first.stats().expired_leases > 0
        assert mesh.faults.get("corrupt", 0) == mesh.faults.get("nonsense", 0) == 0
    async with two(size, 16, lease_s=0.1) as mesh:  # and without a storm everything comes
        await mesh.writer.put(blocks)
        mesh.relay.delay_s = 0.004
        assert await mesh.lease(keys(count)) == contents(blocks)
        assert mesh.figures["resumptions"] > 0
        assert mesh.figures["pulled_bytes"] == count * size


async def test_a_store_that_creeps_costs_bounded_time_and_is_left_alone_for_a_while() -> None:
    async with two(64 << 10, bring_s=1.0) as mesh:
        await mesh.writer.put(puts(4, block_bytes=64 << 10))
        mesh.relay.creep = True
        begin = time.monotonic()
        assert await mesh.lease(keys(4)) == []
        assert time.monotonic() - begin < 3
        mesh.relay.heal()
        await eventually(lambda: mesh.second.stats().reserved == 0)
        await eventually(lambda: mesh.relay.address not in mesh.second.elsewhere.neighbours.shunned)
        assert len(await mesh.lease(keys(4))) == 4, "the next fetch works without a restart"


async def test_a_partition_in_the_middle_leaves_a_right_prefix() -> None:
    size, count = MIB, 12
    async with two(size, 16, bring_s=1.5) as mesh:
        blocks = puts(count, block_bytes=size)
        await mesh.writer.put(blocks)
        mesh.relay.cut = mesh.relay.stall  # type: ignore[method-assign]
        mesh.relay.cut_at = 5 * size
        begin = time.monotonic()
        found = await mesh.lease(keys(count))
        assert time.monotonic() - begin < 4
        assert 0 < len(found) < count
        assert found == contents(blocks[: len(found)])
        await eventually(lambda: mesh.second.stats().reserved == 0)
        mesh.relay.heal()
        await eventually(lambda: mesh.relay.address not in mesh.second.elsewhere.neighbours.shunned)
        rest = await mesh.lease(keys(count))
        assert [data for _, data in rest] == [bytes(block.data) for block in blocks]
        assert [tier for tier, _ in rest].count(common_pb2.TIER_HOST) >= len(found), "the prefix was kept"


async def test_a_source_that_is_away_is_asked_once_and_then_not_for_a_while() -> None:
    async with two() as mesh:
        await mesh.writer.put(puts(3))
        mesh.relay.target = "127.0.0.1:1"
        assert await mesh.lease(keys(3)) == []
        assert sum(mesh.faults.values()) == 1
        connections = mesh.relay.connections
        begin = time.monotonic()
        for _ in range(20):
            assert await mesh.lease(keys(3)) == []
        assert time.monotonic() - begin < 2
        assert mesh.relay.connections == connections


async def test_the_client_hanging_up_ends_the_pull() -> None:
    async with two(MIB, 16) as mesh, raw(mesh.second.address) as client:
        await mesh.writer.put(puts(4, block_bytes=MIB))
        attachment = await client.attach(spec(MIB))
        mesh.relay.stall()
        request = kvstore_pb2.LeaseRequest(attachment_id=attachment, keys=keys(4), sources=[mesh.relay.address])
        call = client.stub.Lease(request)
        await eventually(lambda: mesh.relay.connections)
        call.cancel()
        await eventually(lambda: mesh.second.stats().leases == 0 and mesh.second.stats().reserved == 0)
        mesh.relay.heal()


async def test_what_takes_longer_than_one_lease_may_wait_comes_with_the_next() -> None:
    size, count = MIB, 24
    async with two(size, 32, bring_s=0.3) as mesh:
        blocks = puts(count, block_bytes=size)
        await mesh.writer.put(blocks)
        mesh.relay.delay_s = 0.003
        async with client_of(mesh.second.address, spec(size), timeout_s=10) as client:
            origin, leases, found, more = Origin(sources=(mesh.relay.address,)), 0, 0, True
            while more:
                async with client.lease(keys(count)[found:], origin) as leased:
                    assert len(leased.blocks) > 0
                    for view, block in zip(leased.blocks, blocks[found:], strict=False):
                        assert view == block.data
                    found, more, leases = found + len(leased.blocks), leased.more, leases + 1
            assert found == count
            assert leases > 1
            async with client.lease(keys(30), origin) as leased:
                assert (len(leased.blocks), leased.more) == (count, False), "what nobody has is not on its way"
