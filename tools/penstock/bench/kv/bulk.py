"""Getting and putting 256 MiB, from the same host and from another one."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.bench.kv.blocks import client_of, names, puts
from penstock.bench.kv.memory import Region
from penstock.bench.kv.processes import store_process
from penstock.kv.client.client import Origin, StoreClient

_OURS = Origin(seal=b"s" * 32)
_ROUNDS = 6
"""A store has room for the blocks of so many rounds. A client may reserve a quarter of it at one time, and reserves
small blocks of a whole round."""
_WARM_UP = _ROUNDS + 1
"""Rounds until every slot has been used: the first touch of a page costs ten copies, once in a store's life."""


class Bulk:
    """Rates in bytes/s, for blocks of one size. Made by `open_bulk`."""

    def __init__(self, size: int, block_bytes: int, near: StoreClient, far: StoreClient) -> None:
        self._size = size
        self._block_bytes = block_bytes
        self._near, self._far = near, far
        source, target = Region(size), Region(size)
        source.touch(4)
        target.touch(5)
        self._data, self._into = source.blocks(block_bytes), target.blocks(block_bytes)
        self._stored: list[bytes] = []

    async def warm_up(self) -> None:
        """Touches every slot."""
        for round in range(_WARM_UP):
            await self.put(-1 - round)

    async def put(self, round: int) -> float:
        """Stores new blocks."""
        keys = names(len(self._data), f"{self._block_bytes}/{round}")
        blocks = puts(keys, self._data)
        begin = time.perf_counter()
        stored = await self._near.put(blocks, _OURS)
        seconds = time.perf_counter() - begin
        assert stored == len(blocks), f"{stored} of {len(blocks)} blocks were stored"
        self._stored = keys
        return self._size / seconds

    async def get(self, round: int) -> float:
        """Fetches the blocks of the last put, through shared memory."""
        return await self._fetch(self._near)

    async def get_remote(self, round: int) -> float:
        """The same over the network: the client is told that the store is on another host."""
        return await self._fetch(self._far)

    async def _fetch(self, client: StoreClient) -> float:
        begin = time.perf_counter()
        tiers = await client.fetch(self._stored, self._into, _OURS)
        seconds = time.perf_counter() - begin
        assert len(tiers) == len(self._stored), f"{len(tiers)} of {len(self._stored)} blocks came"
        return self._size / seconds


@asynccontextmanager
async def open_bulk(size: int, block_bytes: int, *, seals: bool = False) -> AsyncIterator[Bulk]:
    """A store with room for a few rounds, so that slots are used again. Clients seal its blocks if `seals`."""
    async with (
        store_process(size * _ROUNDS + (1 << 20)) as (_, address),
        client_of(address, block_bytes, seals=seals) as near,
        client_of(address, block_bytes, "another-host", seals=seals) as far,
    ):
        assert (near.stats.mapped, far.stats.mapped) == (1, 0)
        bulk = Bulk(size, block_bytes, near, far)
        await bulk.warm_up()
        yield bulk
