"""A store whose nearest tier is a real device, and a client of it in a process of its own."""

from __future__ import annotations

import hashlib

from tests.services.kvstore.device.helpers import Reader, bench
from tests.services.kvstore.helpers import eventually, keys, puts, spec

from penstock.kv.device.cuda import open_cuda

MIB = 1 << 20


async def test_blocks_go_up_and_come_back() -> None:
    expected = [bytes(put.data) for put in puts(6)]
    async with bench(blocks=16, open_device=open_cuda) as it:
        await it.only_on_device(6)
        assert await it.read(keys(6)) == (expected, ["gpu"] * 6)
        stats = it.stats
        assert (stats.promoted, stats.supplied, stats.failed_copies, stats.corrupt, stats.off) == (6, 6, 0, 0, 0)


async def test_the_only_copies_come_down() -> None:
    async with bench(blocks=40, device_blocks=16, open_device=open_cuda) as it:
        await it.only_on_device(8, "old")
        await it.promoted(16, "new")
        assert (it.stats.demoted, it.stats.blocks) == (8, 16)
        assert await it.read(keys(8, "old")) == ([bytes(put.data) for put in puts(8, "old")], ["host"] * 8)


async def test_a_client_in_another_process_reads_on_the_device_and_dies() -> None:
    blocks = puts(8)
    async with bench(lease_s=600, open_device=open_cuda) as it:
        await it.promoted(8)
        reader = Reader(it.store.address, keys(8), "cuda", spec())
        try:
            assert await reader.seen() == [hashlib.sha256(block.data).hexdigest() for block in blocks]
            assert it.stats.leases == 1
        finally:
            reader.kill()
        await eventually(lambda: it.stats.leases == 0)
        assert await it.read(keys(8)) == ([bytes(block.data) for block in blocks], ["host"] * 8)
