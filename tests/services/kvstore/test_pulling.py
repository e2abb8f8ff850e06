"""Blocks from the store of another host."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.services.kvstore.helpers import client_of, disk_has, eventually, keys, puts, raw, settings, spec
from tests.services.kvstore.relay import relay_to
from tests.services.kvstore.two import contents, two

from penstock.kv.bytes.checksum import checksum
from penstock.kv.spec import spec_to_message
from penstock.kvstore.elsewhere.transport.base import Landing, Offered, TransportStats
from penstock.kvstore.service import open_kvstore
from penstock.kvstore.table.blocks import TierKind
from penstock.v1 import common_pb2, kvstore_pb2


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


async def test_other_stores_are_asked_last(tmp_path: Path) -> None:
    """What the disk has is not pulled."""
    async with two(blocks=16, nvme_dir=tmp_path, nvme_bytes=2 << 20) as mesh:
        blocks, store = puts(16), mesh.second
        await mesh.writer.put(blocks)
        async with client_of(store.address) as client:
            await client.put(blocks[:10])
            await eventually(lambda: disk_has(store, keys(10)) == 10)
            await client.put(puts(16, "b"))
            assert store.host.table.lookup(keys(10)) == 0
            assert await client.lookup(keys(16)) == 10, "a lookup does not ask other stores"
        tiers = [tier for tier, _ in await mesh.lease(keys(16))]
        assert tiers == [common_pb2.TIER_NVME] * 10 + [common_pb2.TIER_REMOTE] * 6
        assert mesh.figures["pulled_blocks"] == 6
        assert [tier.kind for tier in store.store.tiers] == [TierKind.HOST, TierKind.NVME, TierKind.REMOTE]


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


async def test_no_room_here_is_a_shorter_prefix() -> None:
    async with two(blocks=16) as mesh:
        await mesh.writer.put(puts(16))
        async with client_of(mesh.second.address) as client:
            await client.put(puts(10, "mine"))
            async with client.lease(keys(10, "mine")) as mine:
                assert len(mine.blocks) == 10
                assert len(await mesh.lease(keys(16))) == 6


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
