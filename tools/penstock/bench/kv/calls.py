"""Lookups beside calls that do nothing: latency of one client, rate of sixteen."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from penstock.bench.kv.blocks import client_of, names, puts
from penstock.bench.kv.memory import Region
from penstock.bench.kv.peer import SERVICE
from penstock.bench.kv.processes import store_process
from penstock.rpc.channels import open_channels

CLIENTS = 16
PROMPT_KEYS = 256
"""Keys of a prompt of 4,096 tokens, 16 in a block."""
_BLOCK_BYTES = 4096

Call = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Calls:
    """One round of one kind of call; times in seconds."""

    p50: float
    """Median latency of one client alone."""
    rate: float
    """Calls/s of all clients together."""
    p99: float
    """99th percentile of the latency while all clients call."""


class Callers:
    """The same calls from one client and from many. Made by `open_callers`."""

    def __init__(self, empty: Sequence[Call], lookup: Sequence[Call], calls: int) -> None:
        self._empty, self._lookup, self._calls = empty, lookup, calls

    async def empty(self, round: int) -> Calls:
        """An empty call to a plain grpc.aio server."""
        return await self._measure(self._empty)

    async def lookup(self, round: int) -> Calls:
        """A lookup of all keys of a stored prompt."""
        return await self._measure(self._lookup)

    async def _measure(self, calls: Sequence[Call]) -> Calls:
        alone = await _repeat(calls[0], self._calls)
        begin = time.perf_counter()
        each = await asyncio.gather(*(_repeat(call, self._calls // 4) for call in calls))
        seconds = time.perf_counter() - begin
        together = sorted(one for times in each for one in times)
        return Calls(statistics.median(alone), len(together) / seconds, together[len(together) * 99 // 100])


async def _repeat(call: Call, count: int) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        await call()
        times.append(time.perf_counter() - begin)
    return times


@asynccontextmanager
async def open_callers(peer: str, calls: int) -> AsyncIterator[Callers]:
    """Clients of a store with one prompt in it, and of `peer`; each with a channel of its own."""
    async with AsyncExitStack() as stack:
        _, address = await stack.enter_async_context(store_process(4 * PROMPT_KEYS * _BLOCK_BYTES))
        keys, empty, lookup = names(PROMPT_KEYS, "prompt"), [], []
        for number in range(CLIENTS):
            client = await stack.enter_async_context(client_of(address, _BLOCK_BYTES))
            if number == 0:
                assert await client.put(puts(keys, Region(_BLOCK_BYTES).blocks(_BLOCK_BYTES))) == PROMPT_KEYS
            assert await client.lookup(keys) == PROMPT_KEYS
            lookup.append(lambda client=client: client.lookup(keys))
            channels = await stack.enter_async_context(open_channels())
            method: Any = channels.to(peer, "store").unary_unary(f"/{SERVICE}/Empty")
            empty.append(lambda method=method: method(b""))
        yield Callers(empty, lookup, calls)
