"""Blocks from the store of another host: over a good way, a bad one, and none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from tests.services.kvstore.helpers import client_of, eventually, keys, puts, raw, settings, spec
from tests.services.kvstore.relay import Relay, relay_to

from penstock.kv.bytes.checksum import checksum
from penstock.kv.client.client import Origin, StoreClient
from penstock.kv.spec import spec_to_message
from penstock.kvstore.elsewhere.homes import home
from penstock.kvstore.elsewhere.neighbours import Neighbours
from penstock.kvstore.elsewhere.transport.base import Landing, Offered, TransportStats
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.rpc.channels import Channels
from penstock.v1 import common_pb2, kvstore_pb2

MIB = 1 << 20


@dataclass
class Two:
    """Two stores of one mesh, and the way from the second to the first."""

    first: KvStore
    second: KvStore
    relay: Relay
    writer: StoreClient
    """Of the first."""
    stack: AsyncExitStack
    block_bytes: int

    async def lease(self, names: Sequence[bytes], sources: Sequence[str] | None = None) -> list[tuple[int, bytes]]:
        """Tier and bytes of the blocks that the second store gives, from a client of its own."""
        client = await self.stack.enter_async_context(raw(self.second.address))
        attachment = await client.attach(spec(self.block_bytes))
        where = [self.relay.address] if sources is None else sources
        request = kvstore_pb2.LeaseRequest(attachment_id=attachment, keys=names, sources=where)
        answer = await client.stub.Lease(request)
        memory = client.map()
        found = [
            (tier, bytes(memory.block(offset, answer.length)))
            for tier, offset in zip(answer.tiers, answer.offsets, strict=True)
        ]
        if answer.lease_id:
            await client.stub.Release(kvstore_pb2.ReleaseRequest(attachment_id=attachment, lease_ids=[answer.lease_id]))
        return found

    @property
    def figures(self) -> dict[str, Any]:
        return self.second.elsewhere.figures()

    @property
    def faults(self) -> dict[str, int]:
        return dict(self.second.elsewhere.faults)


@asynccontextmanager
async def two(block_bytes: int = 4096, blocks: int = 64, lease_s: float = 30.0, **other: Any) -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        options: dict[str, Any] = {"stall_s": 0.3, "bring_s": 10.0}
        first = await enter(open_kvstore(settings(blocks, block_bytes, host_id="one", lease_s=lease_s)))
        relay = await enter(relay_to(first.address))
        config = settings(blocks, block_bytes, peers=(relay.address,), **(options | other))
        second = await enter(open_kvstore(config))
        writer = await enter(client_of(first.address, spec(block_bytes), timeout_s=10))
        yield Two(first, second, relay, writer, stack, block_bytes)


def contents(blocks: list[Any]) -> list[tuple[int, bytes]]:
    return [(common_pb2.TIER_REMOTE, bytes(block.data)) for block in blocks]


async def test_missing_blocks_come_from_the_named_store_and_stay() -> None:
    async with two() as mesh:
        blocks = puts(20)
        await mesh.writer.put(blocks)
        assert await mesh.lease(keys(25)) == contents(blocks)
        assert mesh.figures["pulled_blocks"] == 20
        assert mesh.figures["pulled_bytes"] == 20 * 4096
        assert [tier for tier, _ in await mesh.lease(keys(20))] == [common_pb2.TIER_HOST] * 20
        assert mesh.figures["pulled_bytes"] == 20 * 4096, "what is here is not fetched again"
        assert mesh.second.stats().reserved == 0
        assert mesh.second.stats().brought == 20
        stored = mesh.second.host.table.find(keys(20)[7])
        assert stored is not None
        assert (stored.parent, stored.first_token) == (keys(20)[6], 112)


async def test_only_what_is_missing_is_pulled() -> None:
    async with two() as mesh:
        blocks = puts(12)
        await mesh.writer.put(blocks)
        async with client_of(mesh.second.address) as client:
            await client.put(blocks[:5])
        found = await mesh.lease(keys(12))
        assert [tier for tier, _ in found] == [common_pb2.TIER_HOST] * 5 + [common_pb2.TIER_REMOTE] * 7
        assert [data for _, data in found] == [bytes(block.data) for block in blocks]
        assert mesh.figures["pulled_bytes"] == 7 * 4096


async def test_addresses_that_are_no_stores_of_the_mesh_are_never_called() -> None:
    async with two() as mesh, relay_to(mesh.first.address) as stranger:
        await mesh.writer.put(puts(3))
        assert await mesh.lease(keys(3), [stranger.address, "169.254.169.254:80", mesh.second.address]) == []
        assert stranger.connections == 0
        assert mesh.figures["refused_sources"] == 3


async def test_two_leases_share_one_pull() -> None:
    async with two(64 << 10) as mesh:
        blocks = puts(10, block_bytes=64 << 10)
        await mesh.writer.put(blocks)
        both = await asyncio.gather(mesh.lease(keys(10)), mesh.lease(keys(10)))
        assert both[0] == both[1] == contents(blocks)
        assert mesh.figures["pulled_blocks"] == 10


async def test_a_peer_never_makes_a_store_change_its_model() -> None:
    async with two() as mesh:
        await mesh.writer.put(puts(3))
        other = spec(model="ef" * 32)
        async with raw(mesh.second.address) as client:
            attachment = await client.attach(other)
            answer = await client.stub.Lease(
                kvstore_pb2.LeaseRequest(attachment_id=attachment, keys=keys(3), sources=[mesh.relay.address])
            )
            assert not answer.offsets
        assert mesh.faults == {"refused": 1}
        assert mesh.first.stats().blocks == 3
    async with open_kvstore(settings()) as empty, raw(empty.address) as client:
        call = client.stub.Attach(kvstore_pb2.AttachRequest(client="peer", spec=spec_to_message(spec()), peer=True))
        with pytest.raises(grpc.aio.AioRpcError, match="nothing is stored"):
            await call.read()


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


async def test_a_damaged_copy_is_not_taken_and_goes_out_of_service_there() -> None:
    async with two() as mesh:
        blocks = puts(8)
        await mesh.writer.put(blocks)
        damaged = mesh.first.host.table.find(keys(8)[5])
        assert damaged is not None
        mesh.first.host.arena.block(damaged.slot, 4096)[100] ^= 1
        assert await mesh.lease(keys(8)) == contents(blocks[:5])
        assert mesh.faults == {"corrupt": 1}
        assert mesh.first.stats().quarantined == 1
        assert mesh.second.stats().reserved == 0


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


async def test_no_room_here_is_a_shorter_prefix() -> None:
    async with two(blocks=16) as mesh:
        await mesh.writer.put(puts(16))
        async with client_of(mesh.second.address) as client:
            await client.put(puts(10, "mine"))
            async with client.lease(keys(10, "mine")) as mine:
                assert len(mine.blocks) == 10
                assert len(await mesh.lease(keys(16))) == 6


# -- homes


async def test_the_home_of_a_key_is_asked_when_nobody_was_named() -> None:
    """Three stores without a router: what the first has, the third finds, whoever of them is the key's home."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        stores: list[KvStore] = []
        for number in range(3):
            stores.append(await enter(open_kvstore(settings(host_id=f"h{number}", bring_s=10.0))))
        for store in stores:
            store.elsewhere.neighbours.set_joined([other.address for other in stores])
        writer = await enter(client_of(stores[0].address, host="h0"))
        blocks = puts(16)
        await writer.put(blocks)
        known = [store.elsewhere.neighbours.directory for store in stores]
        others = frozenset(store.address for store in stores)
        names = keys(16)

        homes = {name: home(name, others) for name in names}
        told = [name for name in names if homes[name] != stores[0].address]
        await eventually(lambda: all(any(one.holders(name, others) for one in known[1:]) for name in told))
        reader = await enter(client_of(stores[2].address, host="h2"))
        async with reader.lease(names) as leased:
            assert [bytes(view) for view in leased.blocks] == [bytes(block.data) for block in blocks]
            assert leased.tiers == ["remote"] * 16
        figures = stores[2].elsewhere.figures()
        assert figures["homes_knew"] >= 1
        async with reader.lease(keys(3, "unheard of")) as leased:
            assert leased.blocks == []
        for where in others:  # also when the home is the one that holds it, and when it is the one that asks
            name = next((name for name in homes if homes[name] == where), None)
            if name is not None and where != stores[1].address:
                middle = stores[1].elsewhere.neighbours
                assert await middle.who_has(name, time.monotonic() + 5), where


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"seconds": -1.0},
        {"parent": b"short"},
        {"parent": keys(1)[0]},
        {"namespace": b"n" * 17},
    ],
)
async def test_nonsense_about_a_block_is_not_kept(wrong: dict[str, Any]) -> None:
    told: dict[str, Any] = {"seconds": 1.5, "parent": bytes(32), "namespace": b"n" * 16}

    class Other:
        """A way to a store that says what it likes."""

        stats = TransportStats()

        async def fetch(self, peer: str, spec: Any, names: Sequence[bytes], landing: Landing, until: float) -> None:
            offered = Offered(names[0], first_token=0, checksum=checksum(puts(1)[0].data), **told)
            for view in landing.room([offered]):
                assert view is not None
                view[:] = puts(1)[0].data
                view.release()
                landing.landed(offered)

    async with open_kvstore(settings(peers=("127.0.0.1:9",))) as store:
        store.elsewhere.transport = Other()
        async with raw(store.address) as one:
            attachment = await one.attach()
            request = kvstore_pb2.LeaseRequest(attachment_id=attachment, keys=keys(1), sources=["127.0.0.1:9"])
            for expected, more in ((0, wrong), (1, {})):
                told.update({"seconds": 1.5, "parent": bytes(32), "namespace": b"n" * 16} | more)
                assert len((await one.stub.Lease(request)).epochs) == expected
        assert (store.stats().blocks, store.stats().reserved) == (1, 0)


async def test_nobody_is_asked_in_a_circle() -> None:
    """A store that asks as a peer gets what is there, and causes no further questions."""
    async with two() as mesh, raw(mesh.second.address) as client:
        await mesh.writer.put(puts(3))
        attachment = await client.attach(spec())
        request = kvstore_pb2.LeaseRequest(
            attachment_id=attachment, keys=keys(3), sources=[mesh.relay.address], peer=True
        )
        assert not (await client.stub.Lease(request)).offsets
        assert mesh.relay.connections == 0


def test_strangers_are_not_believed() -> None:
    neighbours = Neighbours(["a:1"], Channels(), max_keys=10)
    neighbours.heard("evil:1", keys(2), [])
    neighbours.heard("a:1", keys(1), [])
    assert len(neighbours.directory) == 1
    assert neighbours.usable(["evil:1", "a:1", "a:1"]) == ["a:1"]


async def test_a_store_that_joins_is_told_of_the_keys_that_it_is_now_the_home_of() -> None:
    async with AsyncExitStack() as stack:
        stores: list[KvStore] = []
        for number in range(3):
            stores.append(await stack.enter_async_context(open_kvstore(settings(128, host_id=f"h{number}"))))
        names, addresses = keys(120), [store.address for store in stores]

        def told(number: int, members: list[str]) -> bool:
            """Whether a store knows exactly its share of what the first holds."""
            share = {name for name in names if home(name, members) == addresses[number]}
            directory = stores[number].elsewhere.neighbours.directory
            return {name for name in names if directory.holders(name, set(addresses))} >= share

        writer = await stack.enter_async_context(client_of(stores[0].address, host="h0"))
        await writer.put(puts(120))
        for store in stores[:2]:
            store.elsewhere.neighbours.set_joined(addresses[:2])
        await eventually(lambda: told(1, addresses[:2]))
        for store in stores:
            store.elsewhere.neighbours.set_joined(addresses)
        await eventually(lambda: told(2, addresses))
        share = sum(home(name, addresses) == addresses[2] for name in names)
        assert len(stores[2].elsewhere.neighbours.directory) == share, "and of no others"


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
