"""What a store puts into a shared pool, without the pool."""

from __future__ import annotations

from typing import Any

import pytest
from tests.services.kvstore.helpers import client_of, eventually, puts, settings

from penstock.errors import Unavailable
from penstock.kvstore.elsewhere.mooncake import Pool
from penstock.kvstore.elsewhere.transport.base import Offered, TransportFault
from penstock.kvstore.service import open_kvstore
from penstock.runtime.tasks import beside


class Moody:
    """A pool that refuses the first block, fails with the second, and takes the others."""

    def __init__(self) -> None:
        self.asked = 0
        self.taken: dict[bytes, bytes] = {}

    async def publish(self, block: Offered, data: memoryview, until: float) -> bool:
        self.asked += 1
        if self.asked == 2:
            raise RuntimeError("the master is gone")
        if self.asked > 2:
            self.taken[block.key] = bytes(data)
        return self.asked > 2


class Unreached(Moody):
    """A pool whose master does not answer."""

    async def drop_tenant(self, namespace: bytes, until: float) -> int:
        raise TransportFault("late", "the pool did not answer in time")


async def test_a_pool_that_keeps_a_tenants_blocks_is_told_of() -> None:
    transport: Any = Unreached()
    async with open_kvstore(settings()) as store:
        pool = Pool(store.host, transport, store.store.now)
        with pytest.raises(Unavailable, match="still has blocks"):
            await pool.drop_tenant(b"t" * 16)


async def test_a_pool_that_fails_once_is_asked_again_and_no_pin_is_left() -> None:
    transport: Any = Moody()
    blocks = puts(6)
    async with open_kvstore(settings()) as store, client_of(store.address) as client:
        pool = Pool(store.host, transport, store.store.now)
        with store.host.watched_by(pool):
            async with beside(pool.run, name="pool", on_failure="stop", failed=print):
                assert await client.put(blocks) == 6
                await eventually(lambda: transport.asked == 6 and pool.published == 4)
        assert transport.taken == {put.key: bytes(put.data) for put in blocks[2:]}
        assert pool.left_out == 2
        assert all(block.pins == 0 for block in map(store.host.table.find, [put.key for put in blocks]) if block)
