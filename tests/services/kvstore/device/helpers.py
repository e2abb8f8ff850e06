"""A store with a twin of a device."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.services.kvstore.helpers import HOST, Raw, client_of, eventually, keys, puts, raw, settings

from penstock.kv.client.client import Origin, StoreClient
from penstock.kv.spec import KvSpec
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.kvstore.tiers.device.opening import OpenDevice
from penstock.kvstore.tiers.device.tier import DeviceTier, GpuStats
from penstock.testing.twin import TwinDevice, TwinSwitch

BLOCK = 4096
TWIN = "twin-0"


def gpu_settings(blocks: int = 64, device_blocks: int = 32, block_bytes: int = BLOCK, **other: Any) -> KvStoreConfig:
    """At least 16 blocks on each side, of 4 KiB or another multiple of 512 bytes."""
    return settings(blocks, block_bytes, gpu_bytes=device_blocks * block_bytes, **other)


@dataclass
class Bench:
    """A store with a device, and a client that reads in host memory."""

    store: KvStore
    one: Raw
    client: StoreClient
    switch: TwinSwitch
    config: KvStoreConfig
    held: list[Any] = field(default_factory=list)

    @property
    def gpu(self) -> DeviceTier:
        assert self.store.gpu is not None
        return self.store.gpu

    @property
    def stats(self) -> GpuStats:
        return self.gpu.stats()

    async def warm(self, count: int, chain: str = "a") -> None:
        """Stores a chain, and leases it for a session, so that it is worth the device."""
        await self.client.put(puts(count, chain))
        await self.read(keys(count, chain), f"session {chain}")

    async def promoted(self, count: int, chain: str = "a") -> None:
        """A chain that is on the device, too."""
        await self.warm(count, chain)
        await eventually(lambda: self.gpu.has_blocks(keys(count, chain)) == count)

    async def only_on_device(self, count: int, chain: str = "a") -> None:
        """A chain that host memory has no more."""
        await self.promoted(count, chain)
        await self.flood()
        assert self.host(keys(count, chain)) == 0
        assert self.gpu.has_blocks(keys(count, chain)) == count

    async def flood(self) -> None:
        """Evicts everything from host memory that nobody holds."""
        blocks = self.store.stats().slots
        await eventually(lambda: self.store.stats().leases == 0 and not self.gpu.working)
        await self.client.put(puts(blocks, f"flood{self.store.stats().puts}"))

    def host(self, names: Sequence[bytes]) -> int:
        """How many leading ones host memory has."""
        return self.store.host.table.lookup(names)

    async def read(self, names: Sequence[bytes], session: str = "") -> tuple[list[bytes], list[str]]:
        """Contents and tiers of the leading blocks."""
        async with self.client.lease(names, Origin(session)) as leased:
            copies = [bytes(view) for view in leased.blocks]
            assert leased.still_valid()
            return copies, leased.tiers


class Reader:
    """A process that reads on the device, see reader.py."""

    def __init__(self, address: str, names: Sequence[bytes], kind: str, block_spec: KvSpec) -> None:
        argument = json.dumps([address, HOST, asdict(block_spec), [name.hex() for name in names], kind])
        program = Path(__file__).with_name("reader.py")
        self._process = subprocess.Popen(
            [sys.executable, str(program), argument], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    async def seen(self) -> list[str]:
        """The sha256 of each block that it found there."""
        stdout = self._process.stdout
        assert stdout is not None
        while line := await asyncio.to_thread(stdout.readline):
            if line.startswith(b"["):
                hashes: list[str] = json.loads(line)
                return hashes
        raise AssertionError("the reader failed")

    def kill(self) -> None:
        """Leaves it no time to give anything back."""
        self._process.kill()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


@asynccontextmanager
async def bench(
    *,
    switch: TwinSwitch | None = None,
    open_device: OpenDevice | None = None,
    block_spec: KvSpec | None = None,
    **other: Any,
) -> AsyncIterator[Bench]:
    switch, config = switch or TwinSwitch(), gpu_settings(**other)
    async with (
        open_kvstore(config, open_device or (lambda index: TwinDevice(index, switch))) as store,
        raw(store.address) as one,
        client_of(store.address, block_spec, HOST) as client,
    ):
        try:
            yield Bench(store, one, client, switch, config)
        finally:
            switch.release()
