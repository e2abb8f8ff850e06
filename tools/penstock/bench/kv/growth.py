"""The same calls on a store of a thousand and of a million blocks, both full, so that every put evicts."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from penstock.bench.kv.blocks import client_of, names, puts
from penstock.bench.kv.memory import Region
from penstock.bench.kv.processes import private_bytes, store_process
from penstock.kv.bytes.arena import Layout
from penstock.kv.client.client import StoreClient

FEW, MANY = 1_000, 1_000_000
_BLOCK_BYTES = 64
_PROMPT = 256
_EMPTY_BLOCKS = 16
_CHAIN_BLOCKS = 250
"""Blocks are stored in chains of this length."""
_FILL_BLOCKS = 16 * _CHAIN_BLOCKS
"""Blocks in one put."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one call for 256 blocks, median of a round."""

    lookup: float
    get: float
    put: float


class Filled:
    """A full store. Made by `open_filled`."""

    def __init__(self, client: StoreClient, count: int, calls: int, entry_bytes: float) -> None:
        self._client, self._count, self._calls = client, count, calls
        self.entry_bytes = entry_bytes
        """Bytes of the store's own memory per block."""
        self._data = Region(_BLOCK_BYTES).blocks(_BLOCK_BYTES)
        self._into = Region(_BLOCK_BYTES * _PROMPT).blocks(_BLOCK_BYTES)

    async def measure(self, round: int) -> Costs:
        """One round."""
        lookups, gets, stores = [], [], []
        for call in range(self._calls):
            keys = names(_PROMPT, f"growth/{self._count}/{round}/{call}")
            begin = time.perf_counter()
            stored = await self._client.put(puts(keys, self._data))
            put = time.perf_counter()
            found = await self._client.lookup(keys)
            looked = time.perf_counter()
            got = await self._client.fetch(keys, self._into)
            fetched = time.perf_counter()
            assert stored == found == len(got) == _PROMPT, (stored, found, len(got))
            stores.append(put - begin)
            lookups.append(looked - put)
            gets.append(fetched - looked)
        return Costs(statistics.median(lookups), statistics.median(gets), statistics.median(stores))


@asynccontextmanager
async def open_filled(count: int, calls: int) -> AsyncIterator[Filled]:
    """A store that holds exactly `count` blocks, all of them used."""
    host_bytes = 8192 + count * (_BLOCK_BYTES + 8)
    while Layout.fit(host_bytes, _BLOCK_BYTES).slots < count:
        host_bytes += _BLOCK_BYTES
    data = Region(_BLOCK_BYTES).blocks(_BLOCK_BYTES)
    async with store_process(host_bytes) as (pid, address), client_of(address, _BLOCK_BYTES) as client:
        await client.put(puts(names(_EMPTY_BLOCKS, "first"), data))
        before = private_bytes(pid)
        for start in range(0, count, _FILL_BLOCKS):
            chains = range(start, min(count, start + _FILL_BLOCKS), _CHAIN_BLOCKS)
            await client.put([block for at in chains for block in puts(names(_CHAIN_BLOCKS, f"fill/{at}"), data)])
        yield Filled(client, count, calls, (private_bytes(pid) - before) / count)
