"""The device tier over the code for CUDA devices, which runs on a stand-in for cupy here."""

from __future__ import annotations

import gc

from tests.libs.kv.fake_cupy import Fake
from tests.services.kvstore.device.helpers import bench
from tests.services.kvstore.helpers import HOST, eventually, keys, puts, spec

from penstock.kv.client.client import open_store
from penstock.kv.device.cuda import open_cuda
from penstock.rpc.channels import open_channels


async def test_up_down_and_on_the_device() -> None:
    cupy, expected = Fake(), [bytes(put.data) for put in puts(5)]
    async with bench(blocks=16, open_device=lambda index: open_cuda(index, cupy)) as it:
        await eventually(lambda: cupy.registered)
        assert list(cupy.registered.values()) == [it.config.host_bytes], "the arena itself is the pinned memory"
        await it.only_on_device(5)
        async with open_channels() as channels:
            near, channel = open_cuda(0, cupy), channels.to(it.store.address, "store")
            async with open_store(channel, "near", spec(), HOST, device=near) as client:
                async with client.lease(keys(5), on_device=True) as leased:
                    assert [bytes(view) for view in leased.on_device.views] == expected
                    assert leased.still_valid() and len(cupy.opened) == 1
        gc.collect()
        assert cupy.opened == [], "closed with the client"
        assert await it.read(keys(5)) == (expected, ["gpu"] * 5)
        assert (it.stats.failed_copies, it.stats.corrupt) == (0, 0)
    gc.collect()
    assert not cupy.allocated and not cupy.registered


async def test_an_error_that_stays_turns_the_tier_off_and_one_that_does_not_does_not() -> None:
    cupy = Fake()
    async with bench(blocks=16, open_device=lambda index: open_cuda(index, cupy)) as it:
        cupy.fail["memcpyAsync"] = 1
        await it.warm(2)
        await eventually(lambda: it.stats.failed_copies == 1)
        assert it.stats.off == 0
        cupy.fail["memcpyAsync"] = 719
        await it.read(keys(2), "c")
        await eventually(lambda: it.stats.off == 1)
        cupy.fail.clear()
        assert await it.read(keys(2)) == ([bytes(put.data) for put in puts(2)], ["host"] * 2)
