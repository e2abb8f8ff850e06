"""By hand: `python -m tests.services.kvstore.bench [BLOCKS] [KIB]`: put and fetch beside memcpy in the same rounds."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.services.kvstore.helpers import HOST, ROOT, StoreProcess, client_of, keys, spec

from penstock.kv.client import BlockPut

ROUNDS = 9
WARM_UP = 3
"""Rounds until every slot has been used once: a first touch costs ten copies."""


class Rates:
    """GB/s by name."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._all: dict[str, list[float]] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._all.setdefault(name, []).append(self._size / (time.perf_counter() - begin) / 1e9)

    def show(self) -> None:
        for name, rates in self._all.items():
            warm = rates[WARM_UP:]
            print(f"  {name:12} {statistics.median(warm):6.2f} GB/s [{min(warm):.2f} {max(warm):.2f}]", end="")
            print(f"  cold {rates[0]:.2f}" if name != "memcpy" else "")


async def compare(blocks: int, block_bytes: int, host: str) -> None:
    """A store with room for two rounds and a half, so that later rounds reuse slots."""
    store = StoreProcess(blocks * block_bytes * 5 // 2 + (1 << 20))
    source, target = memoryview(bytearray(b"x") * (blocks * block_bytes)), memoryview(bytearray(blocks * block_bytes))
    cuts = [slice(start, start + block_bytes) for start in range(0, len(source), block_bytes)]
    rates = Rates(blocks * block_bytes)
    try:
        async with client_of(store.address, spec(block_bytes), host, timeout_s=30) as client:
            for round_ in range(ROUNDS):
                names = keys(blocks, f"{round_}-")
                puts = [BlockPut(n, names[i - 1] if i else ROOT, 0, source[cuts[i]]) for i, n in enumerate(names)]
                with rates.time("memcpy"):
                    for cut in cuts:
                        target[cut] = source[cut]
                with rates.time("put"):
                    assert await client.put(puts) == blocks
                with rates.time("fetch"):
                    async with client.lease(names) as leased:
                        for cut, view in zip(cuts, leased.blocks, strict=True):
                            target[cut] = view
                        assert leased.still_valid()
    finally:
        store.close()
    print(f"{blocks} blocks of {block_bytes >> 10} KiB, {'arena' if host == HOST else 'stream'}")
    rates.show()


def main() -> None:
    blocks, kib = (int(argument) for argument in [*sys.argv[1:], "256", "1024"][:2])
    for host in (HOST, "another-host"):
        asyncio.run(compare(blocks, kib << 10, host))


if __name__ == "__main__":
    main()
