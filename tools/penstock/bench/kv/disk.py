"""The disk tier: how fast blocks come from it, and what its writing costs those who get blocks from memory."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.kv.blocks import client_of, names, puts, stats_of
from penstock.bench.kv.files import PlainFile
from penstock.bench.kv.memory import Region
from penstock.bench.kv.processes import store_process
from penstock.kv.client.client import Leased, StoreClient
from penstock.v1 import kvstore_pb2

_MIB = 1 << 20
_BLOCKS = 256
"""Blocks of 1 MiB in a chain. Two chains take turns in memory, so each is always on the disk when it is asked for."""
_SPARE = 16
_PAUSE_S = 0.02
_LONGEST_S = 120.0
_HOT = 32
_PATIENCE = 5
_ATTEMPTS = 5
_COLD = 256


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes/s of one round."""

    read: float
    """Rate until the blocks lie in shared memory, verified and pinned."""
    get: float
    """Rate until the client has checked copies of them."""


class DiskReads:
    """Reads of blocks that are only on the disk. Made by `open_disk_reads`."""

    def __init__(self, client: StoreClient, address: str, file: PlainFile, scratch: PlainFile) -> None:
        self.file = file
        """The file that is read."""
        self.scratch = scratch
        """The file that is written in between, so that the other one rests as long as the tier's blocks do."""
        self._client, self._address = client, address
        self._chains = [names(_BLOCKS, f"disk/{number}") for number in range(2)]
        self._into = Region(_BLOCKS * _MIB)
        self._into.touch(6)

    async def fill(self) -> None:
        """Stores both chains and waits until both are on the disk. The second leaves the first no room in memory."""
        data = Region(_BLOCKS * _MIB)
        data.touch(7)
        for number, chain in enumerate(self._chains, 1):
            assert await self._client.put(puts(chain, data.blocks(_MIB))) == _BLOCKS
            await written(self._address, number * _BLOCKS)

    async def read(self, round: int) -> DiskRates:
        """A lease, and a checked copy of what it brought."""
        chain, into = self._chains[round % 2], self._into.blocks(_MIB)
        begin = time.perf_counter()
        async with self._client.lease(chain, checked=False) as leased:
            read = time.perf_counter()
            tiers = leased.tiers
            good = await asyncio.to_thread(_copy, leased, into)
        end = time.perf_counter()
        assert tiers.count("nvme") >= _BLOCKS - _SPARE, f"{len(tiers)} blocks, of which {tiers.count('nvme')} from disk"
        assert good == _BLOCKS, f"{good} of {_BLOCKS} copies are right"
        return DiskRates(_BLOCKS * _MIB / (read - begin), _BLOCKS * _MIB / (end - begin))


def _copy(leased: Leased, into: Sequence[memoryview]) -> int:
    for index, target in enumerate(into):
        if not leased.copy(index, target):
            return index
    return len(into)


class BusyGets:
    """Blocks of the host tier, while the disk tier writes others or does not. Made by `open_busy_gets`."""

    def __init__(self, client: StoreClient, address: str, gets: int) -> None:
        self._client, self._address, self._gets = client, address, gets
        self._hot = names(_HOT, "hot")
        self._data = Region(_COLD * _MIB)
        self._data.touch(8)
        self._into = Region(_HOT * _MIB)
        self._into.touch(9)
        self.write_rates: list[float] = []
        """Bytes/s that the disk tier wrote while gets were measured."""

    async def fill(self) -> None:
        """Stores the blocks that are fetched."""
        assert await self._client.put(puts(self._hot, self._data.blocks(_MIB))) == _HOT

    async def idle(self, round: int) -> float:
        """Seconds of a get, median, while nothing is written."""
        await settled(self._address)
        return await self._get()

    async def busy(self, round: int) -> float:
        """Seconds of a get, median, while blocks that were put before are written to the disk.

        On a busy machine gets may outlast the writing: then it is tried again.
        """
        for attempt in range(_ATTEMPTS):
            await settled(self._address)
            blocks = puts(names(_COLD, f"cold/{round}/{attempt}"), self._data.blocks(_MIB))
            assert await self._client.put(blocks) == _COLD
            before, begin = (await stats_of(self._address)).nvme, time.perf_counter()
            seconds = await self._get()
            after = (await stats_of(self._address)).nvme
            if after.pending:
                self.write_rates.append((after.written_bytes - before.written_bytes) / (time.perf_counter() - begin))
                return seconds
        raise RuntimeError(f"the disk tier was done before the gets were, {_ATTEMPTS} times")

    async def _get(self) -> float:
        """Only gets from memory count: a block that is on the disk, too, may leave memory at any time."""
        times: list[float] = []
        for _ in range(_PATIENCE * self._gets):
            begin = time.perf_counter()
            tiers = await self._client.fetch(self._hot, self._into.blocks(_MIB))
            seconds = time.perf_counter() - begin
            if tiers == ["host"] * _HOT:
                times.append(seconds)
            else:  # what was not wanted for a while may have left memory, or the store
                await self._client.put(puts(self._hot, self._data.blocks(_MIB)))
            if len(times) == self._gets:
                return statistics.median(times)
        raise RuntimeError(f"only {len(times)} gets out of {_PATIENCE * self._gets} were from memory")


async def written(address: str, blocks: int) -> None:
    """Returns when so many blocks are on the disk."""
    await _until(address, lambda stats: stats.nvme.blocks >= blocks)


async def settled(address: str) -> None:
    """Returns when nothing is left to write."""
    await _until(address, lambda stats: stats.nvme.pending == 0)


async def _until(address: str, condition: Callable[[kvstore_pb2.StatsResponse], bool]) -> None:
    async with asyncio.timeout(_LONGEST_S):
        while not condition(await stats_of(address)):  # noqa: ASYNC110  # another process knows
            await asyncio.sleep(_PAUSE_S)


@asynccontextmanager
async def _store(directory: Path, host_blocks: int, nvme_blocks: int) -> AsyncIterator[tuple[StoreClient, str]]:
    options = ("--nvme-dir", str(directory), "--nvme-bytes", str(nvme_blocks * _MIB), "--bring-s", "30")
    async with (
        store_process(host_blocks * _MIB + _MIB, *options) as (_, address),
        client_of(address, _MIB) as client,
    ):
        yield client, address


@asynccontextmanager
async def open_disk_reads() -> AsyncIterator[DiskReads]:
    """A store whose memory holds one chain of two, and a plain file beside its directory."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as path:
        async with _store(Path(path, "tier"), _BLOCKS + _SPARE, 4 * _BLOCKS) as (client, address):
            direct = bool((await stats_of(address)).nvme.direct)
            files = [PlainFile(Path(path, name), _BLOCKS * _MIB, direct=direct) for name in ("file", "scratch")]
            try:
                reads = DiskReads(client, address, *files)
                await reads.fill()
                yield reads
            finally:
                for file in files:
                    file.close()


@asynccontextmanager
async def open_busy_gets(gets: int) -> AsyncIterator[BusyGets]:
    """A store with room in memory for what is got and for two rounds of what is written."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as path:
        async with _store(Path(path, "tier"), _HOT + 2 * _COLD + _SPARE, 4 * _COLD) as (client, address):
            busy = BusyGets(client, address, gets)
            await busy.fill()
            yield busy
