"""What a worker does with blocks on its device: a copy from a slot that changed hands meanwhile counts for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tests.services.kvstore.device.helpers import Bench, bench
from tests.services.kvstore.helpers import BLOCK_BYTES, HOST, eventually, keys, puts, spec

from penstock.engine.hooks import Copy
from penstock.engine.pages import PagePool
from penstock.kv.client.client import open_store
from penstock.rpc.channels import open_channels
from penstock.runtime.metrics import WorkerMetrics
from penstock.testing.twin import TwinDevice
from penstock.worker.fetching import Fetcher
from penstock.worker.stored import StoredKeys


class Pages:
    """A PageWriter over a list. `meanwhile` happens after the copies, before the write is over."""

    block_size, block_bytes = 16, BLOCK_BYTES

    def __init__(self, meanwhile: Any = None) -> None:
        self.content: list[bytes] = []
        self._meanwhile = meanwhile

    async def take(self, first_block: int, blocks: int, within_s: float | None = None) -> int:
        return 0

    def settled(self, blocks: int) -> None:
        assert blocks <= len(self.content)

    async def write(self, first_block: int, blocks: Sequence[Any], copy: Copy | None = None) -> int:
        assert first_block == len(self.content) and copy is not None
        for index, block in enumerate(blocks):
            if isinstance(block, memoryview):
                there = bytearray(block.nbytes)
                if not copy(index, memoryview(there)):
                    return index
                self.content.append(bytes(there))
            else:
                self.content.append(bytes(torch.from_dlpack(block).numpy()))
        if self._meanwhile is not None:
            await self._meanwhile()
        return len(blocks)


async def fetch(it: Bench, pages: Pages, count: int) -> tuple[Fetcher, bool]:
    async with open_channels() as channels:
        channel = channels.to(it.store.address, "store")
        async with open_store(channel, "worker", spec(), HOST, device=TwinDevice()) as client:
            metrics = WorkerMetrics()
            known = StoredKeys(client, PagePool(1), metrics)
            fetcher = Fetcher(store=client, metrics=metrics, keys=keys(count), block_size=16, known=known)
            return fetcher, await fetcher.upto(count, pages)


async def test_blocks_from_the_device_and_those_behind_them() -> None:
    async with bench() as it:
        await it.promoted(3)
        await it.client.put(puts(5))
        pages = Pages()
        fetcher, complete = await fetch(it, pages, 5)
        assert complete and pages.content == [bytes(put.data) for put in puts(5)]
        assert fetcher.used(80) == {"gpu": 48, "host": 32}


async def test_a_wrong_block_behind_them_is_found_by_its_own_checksum() -> None:
    async with bench() as it:
        await it.promoted(3)
        await it.client.put(puts(5))
        await it.one.attach()
        lease = await it.one.lease(keys(5))
        it.one.map().block(lease.offsets[3], BLOCK_BYTES)[9] ^= 1
        pages = Pages()
        fetcher, complete = await fetch(it, pages, 5)
        assert not complete and fetcher.blocks == 3
        assert fetcher.used(80) == {"gpu": 48}
        assert it.store.stats().quarantined == 1


async def test_a_slot_that_changed_hands_during_the_copy() -> None:
    async with bench(blocks=64, device_blocks=16, lease_s=0.02) as it:
        await it.promoted(16)

        async def others_come() -> None:
            await eventually(lambda: it.stats.leases == 0)
            await it.promoted(4, "new")

        fetcher, complete = await fetch(it, Pages(others_come), 16)
        assert not complete
        assert (fetcher.blocks, fetcher.tiers) == (0, [])
