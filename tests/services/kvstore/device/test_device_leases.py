"""Clients that read on the store's device: the blocks themselves, pinned for as long as they are read."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
from tests.services.kvstore.device.helpers import TWIN, Bench, Reader, bench
from tests.services.kvstore.helpers import BLOCK_BYTES, HOST, eventually, keys, puts, spec

from penstock.kv.client.client import Origin, StoreClient, open_store
from penstock.kv.device.memory import DeviceView
from penstock.rpc.channels import open_channels
from penstock.testing.twin import TwinDevice
from penstock.v1 import kvstore_pb2


def content(view: DeviceView) -> bytes:
    return bytes(torch.from_dlpack(view).numpy())


def data(count: int, chain: str = "a") -> list[bytes]:
    return [bytes(put.data) for put in puts(count, chain)]


@asynccontextmanager
async def near(it: Bench, device: TwinDevice | None = None, host: str = HOST) -> AsyncIterator[StoreClient]:
    """A client on the store's device, with a twin of its own, as another process would have."""
    async with open_channels() as channels:
        channel = channels.to(it.store.address, "store")
        async with open_store(channel, "near", spec(), host, device=device or TwinDevice()) as client:
            yield client


async def test_blocks_are_read_where_they_lie() -> None:
    async with bench() as it, near(it) as client:
        await it.promoted(4)
        await it.client.put(puts(6))
        async with client.lease(keys(8), on_device=True) as leased:
            assert [content(view) for view in leased.on_device.views] == data(4)
            assert [bytes(view) for view in leased.blocks] == data(6)[4:], "what follows, in the same round trip"
            assert leased.tiers == ["host"] * 2
            assert leased.still_valid()
            assert (it.stats.leases, it.store.stats().leases) == (1, 1)
        await eventually(lambda: it.stats.leases == 0 and it.store.stats().leases == 0)
        assert (client.stats.on_device, client.stats.fetched, it.stats.hits) == (4, 2, 4)
        async with client.lease(keys(4), on_device=True) as leased:
            assert (len(leased.on_device.views), leased.blocks) == (4, [])
            assert it.store.stats().leases == 0


async def test_nothing_is_left_to_host_memory_when_a_client_reads_only_there() -> None:
    async with bench(blocks=16) as it, near(it) as client:
        await it.only_on_device(4)
        async with client.lease(keys(4), on_device=True) as leased:
            assert [content(view) for view in leased.on_device.views] == data(4)
        assert (it.stats.supplied, it.host(keys(4))) == (0, 0)
        async with client.lease(keys(4)) as leased:
            assert leased.on_device.views == []
            assert [bytes(view) for view in leased.blocks] == data(4)
            assert leased.tiers == ["gpu"] * 4


async def test_a_leased_slot_is_not_reused() -> None:
    async with bench(blocks=64, device_blocks=16) as it, near(it) as client:
        await it.promoted(10, "old")
        async with client.lease(keys(10, "old"), on_device=True) as leased:
            await it.warm(16, "new")
            await eventually(lambda: not it.gpu.working)
            assert it.gpu.has_blocks(keys(16, "new")) == 6
            assert [content(view) for view in leased.on_device.views] == data(10, "old")
            assert leased.still_valid()
        await eventually(lambda: it.stats.leases == 0)
        await it.read(keys(16, "new"), "session new")
        await eventually(lambda: it.gpu.has_blocks(keys(16, "new")) == 16)


async def test_a_reader_that_is_too_slow_is_told() -> None:
    async with bench(blocks=64, device_blocks=16, lease_s=0.02) as it, near(it) as client:
        await it.promoted(16, "old")
        async with client.lease(keys(16, "old"), on_device=True) as leased:
            assert leased.still_valid()
            await eventually(lambda: it.stats.leases == 0)
            assert leased.still_valid(), "over, but every slot is still as it was"
            await it.promoted(4, "new")
            assert not leased.still_valid()
        await eventually(lambda: client.stats.lapsed == 1)


async def test_a_slot_has_no_holder_while_it_changes_hands() -> None:
    """The epoch goes before the first new byte, and comes with the last."""
    async with bench(blocks=64, device_blocks=16, lease_s=0.02) as it, near(it) as client:
        await it.promoted(16, "old")
        async with client.lease(keys(16, "old"), on_device=True) as leased:
            await eventually(lambda: it.stats.leases == 0)
            it.switch.piece_bytes = 1000
            it.switch.hold(after=1)
            await it.warm(1, "new")
            await eventually(it.switch.stalled)
            assert not leased.still_valid()
            it.switch.release()


async def test_tensors_outlive_the_store_but_do_not_count() -> None:
    async with bench() as it, near(it) as client:
        await it.promoted(2)
        async with client.lease(keys(2), on_device=True) as leased:
            tensor = torch.from_dlpack(leased.on_device.views[1])
    assert bytes(tensor.numpy()) == data(2)[1], "mapped, if by nobody vouched for"


async def test_a_lost_device_is_told_to_its_readers() -> None:
    async with bench(blocks=16) as it, near(it) as client:
        await it.only_on_device(2)
        async with client.lease(keys(2), on_device=True) as leased:
            it.switch.lose()
            await it.read(keys(2))
            assert it.stats.off == 1
            assert not leased.still_valid()
        async with client.lease(keys(2), on_device=True) as leased:
            assert (leased.on_device.views, leased.blocks) == ([], [])


@pytest.mark.parametrize("why", ["other-host", "no-device", "broken"])
async def test_a_client_that_can_not_read_there_reads_in_host_memory(why: str) -> None:
    class Broken(TwinDevice):
        def open(self, handle: bytes, size: int) -> object:
            self.switch.lose()
            return super().open(handle, size)

    async with bench() as it:
        await it.promoted(3)
        host = "elsewhere" if why == "other-host" else HOST
        device = Broken() if why == "broken" else TwinDevice()
        if why == "no-device":
            device.info = type(device.info)(0, "gpu-of-another", "twin", 1 << 20)
        async with near(it, device, host) as client:
            async with client.lease(keys(3), on_device=True) as leased:
                assert leased.on_device.views == []
                assert [bytes(view) for view in leased.blocks] == data(3)
            assert client.stats.on_device == 0


async def test_two_stores_and_a_store_that_comes_back() -> None:
    async with bench() as it:
        async with open_channels() as channels:
            async with open_store(
                channels.to(it.store.address, "store"), "near", spec(), HOST, device=TwinDevice()
            ) as client:
                await it.promoted(2)
                async with client.lease(keys(2), on_device=True) as leased:
                    attachment = client._link.attachment
                    assert attachment is not None
                    client._link.lost(attachment, "test")
                    assert [content(view) for view in leased.on_device.views] == data(2), "still mapped for its user"
                    assert attachment.on_device is not None
                assert attachment.on_device is None
                await eventually(lambda: client.connected)
                async with client.lease(keys(2), on_device=True) as leased:
                    assert len(leased.on_device.views) == 2


async def test_the_store_does_not_lease_on_the_device_to_those_who_said_nothing_of_it() -> None:
    async with bench() as it:
        await it.promoted(2)
        attachment = await it.one.attach()
        assert not it.one.attached.HasField("device")
        request = kvstore_pb2.LeaseRequest(attachment_id=attachment, keys=keys(2), on_device=True)
        answer = await it.one.stub.Lease(request)
        assert not answer.HasField("device") and len(answer.offsets) == 2
        release = kvstore_pb2.ReleaseRequest(attachment_id=attachment, device_lease_ids=[1, 2])
        assert list((await it.one.stub.Release(release)).device_released) == [False, False]


async def test_a_wrong_block_on_the_device_can_be_taken_out_of_service() -> None:
    async with bench() as it:
        await it.promoted(2)
        attachment = await it.one.attach(device=TWIN)
        answer = await it.one.stub.Lease(
            kvstore_pb2.LeaseRequest(attachment_id=attachment, keys=keys(2), on_device=True)
        )
        bad = kvstore_pb2.QuarantineRequest(attachment_id=attachment, key=keys(2)[1], epoch=answer.device.epochs[1])
        assert (await it.one.stub.Quarantine(bad)).removed
        assert not (await it.one.stub.Quarantine(bad)).removed
        assert (it.gpu.has_blocks(keys(2)), it.host(keys(2))) == (1, 2)


async def test_a_killed_client_gives_everything_back() -> None:
    """And it read, in a process of its own, what lies on the device."""
    async with bench(lease_s=600) as it:
        await it.promoted(3)
        reader = Reader(it.store.address, keys(3), "twin", spec())
        try:
            assert await reader.seen() == [hashlib.sha256(block).hexdigest() for block in data(3)]
            assert (it.stats.leases, it.stats.used_bytes) == (1, 3 * BLOCK_BYTES)
        finally:
            reader.kill()
        await eventually(lambda: it.stats.leases == 0)
        await eventually(lambda: it.store.stats().attachments == 1)


async def test_what_is_used_on_the_device_stays_there() -> None:
    """The last used by those who read there, though host memory knows nothing of it."""
    async with bench(blocks=64, device_blocks=16) as it, near(it) as client:
        await it.promoted(8, "old")
        await it.promoted(8, "older")
        async with client.lease(keys(8, "old"), Origin("c"), on_device=True) as leased:
            assert len(leased.on_device.views) == 8
        await eventually(lambda: it.stats.leases == 0)
        await it.promoted(8, "new")
        assert (it.gpu.has_blocks(keys(8, "old")), it.gpu.has_blocks(keys(8, "older"))) == (8, 0)
