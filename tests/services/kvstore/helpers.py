"""What tests of the store and of its client share."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from penstock.kv.bytes.arena import ArenaMap, Layout
from penstock.kv.bytes.checksum import checksum
from penstock.kv.client.client import BlockPut, StoreClient, open_store
from penstock.kv.hint import ReturnHint
from penstock.kv.spec import KvSpec, spec_to_message
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.service import KvStore
from penstock.kvstore.table.blocks import Block, TierKind
from penstock.kvstore.table.promises import Grant
from penstock.kvstore.tiers.base import Dropped, Room, Supplier, Wish
from penstock.kvstore.tiers.disk.tier import DiskTier
from penstock.rpc.channels import open_channels
from penstock.runtime.lifecycle import SUPERVISOR_FD
from penstock.v1 import kvstore_pb2, kvstore_pb2_grpc

HOST = "test-host"
BLOCK_BYTES = 4096
ROOT = bytes(32)


def spec(block_bytes: int = BLOCK_BYTES, **other: Any) -> KvSpec:
    fields: dict[str, Any] = {
        "model": "ab" * 32,
        "tokenizer": "cd" * 32,
        "layout": "v1",
        "dtype": "float32",
        "block_size": 16,
        "block_bytes": block_bytes,
    }
    return KvSpec(**(fields | other))


def settings(blocks: int = 64, block_bytes: int = BLOCK_BYTES, **other: Any) -> KvStoreConfig:
    """A store with room for exactly `blocks`, at least 16 of 4 KiB."""
    size = 8192 + blocks * (block_bytes + 8)
    assert Layout.fit(size, block_bytes).slots == blocks
    return KvStoreConfig(**({"host_bytes": size, "host_id": HOST, "cooling_s": 0.05} | other))


def keys(count: int, chain: str = "a") -> list[bytes]:
    return [hashlib.sha256(f"{chain}{number}".encode()).digest() for number in range(count)]


def puts(count: int, chain: str = "a", block_bytes: int = BLOCK_BYTES) -> list[BlockPut]:
    """A chain of blocks with contents that only this chain has."""
    names = keys(count, chain)
    contents = random.Random(chain)
    return [
        BlockPut(key, names[number - 1] if number else ROOT, number * 16, memoryview(contents.randbytes(block_bytes)))
        for number, key in enumerate(names)
    ]


async def eventually(condition: Callable[[], object]) -> None:
    """Lets everybody else run until `condition` holds; the time is bounded, not guessed."""
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass(frozen=True)
class Ref:
    """One block of a lease."""

    offset: int
    length: int
    epoch: int
    checksum: bytes


def refs(lease: kvstore_pb2.LeaseResponse) -> list[Ref]:
    return [
        Ref(offset, lease.length, epoch, lease.checksums[16 * index : 16 * index + 16])
        for index, (offset, epoch) in enumerate(zip(lease.offsets, lease.epochs, strict=True))
    ]


@dataclass
class Raw:
    """A client without the client library's care."""

    stub: Any
    calls: list[Any] = field(default_factory=list)
    attached: kvstore_pb2.AttachResponse = field(default_factory=kvstore_pb2.AttachResponse)
    memory: ArenaMap | None = None

    async def attach(
        self, block_spec: KvSpec | None = None, client: str = "raw", device: str = "", draft: bool = False
    ) -> str:
        message = spec_to_message(block_spec or spec())
        call = self.stub.Attach(kvstore_pb2.AttachRequest(client=client, spec=message, device=device, draft=draft))
        self.calls.append(call)
        self.attached = await call.read()
        return self.attached.attachment_id

    def map(self) -> ArenaMap:
        it = self.attached
        layout = Layout(it.slots, it.slots_at, it.slot_stride, it.epochs_at)
        self.memory = ArenaMap(it.arena_path, it.arena_bytes, it.arena_id, layout)
        return self.memory

    async def reserve(self, blocks: Sequence[BlockPut], attachment: str = "") -> kvstore_pb2.ReserveResponse:
        wanted = [kvstore_pb2.ReserveBlock(key=b.key, parent=b.parent, first_token=b.first_token) for b in blocks]
        request = kvstore_pb2.ReserveRequest(
            attachment_id=attachment or self.attached.attachment_id, blocks=wanted, length=blocks[0].data.nbytes
        )
        return await self.stub.Reserve(request)

    async def commit(
        self, blocks: Sequence[BlockPut], rooms: Sequence[kvstore_pb2.Reservation], attachment: str = ""
    ) -> list[bool]:
        commits = [
            kvstore_pb2.CommitBlock(key=block.key, epoch=room.epoch, checksum=checksum(block.data))
            for block, room in zip(blocks, rooms, strict=True)
        ]
        request = kvstore_pb2.CommitRequest(attachment_id=attachment or self.attached.attachment_id, blocks=commits)
        return list((await self.stub.Commit(request)).committed)

    async def lease(
        self, names: Sequence[bytes], seconds: float = 0, attachment: str = ""
    ) -> kvstore_pb2.LeaseResponse:
        return await self.stub.Lease(
            kvstore_pb2.LeaseRequest(
                attachment_id=attachment or self.attached.attachment_id, keys=names, lease_s=seconds
            )
        )

    async def lookup(self, names: Sequence[bytes]) -> int:
        return (await self.stub.Lookup(kvstore_pb2.LookupRequest(keys=names))).found

    async def stats(self) -> kvstore_pb2.StatsResponse:
        return await self.stub.Stats(kvstore_pb2.StatsRequest())

    async def settle(self, condition: Callable[[kvstore_pb2.StatsResponse], object]) -> kvstore_pb2.StatsResponse:
        """The store's figures once they are as they should become."""
        async with asyncio.timeout(15):
            while not condition(stats := await self.stats()):
                await asyncio.sleep(0.002)
        return stats


@asynccontextmanager
async def raw(address: str) -> AsyncIterator[Raw]:
    async with open_channels() as channels:
        client = Raw(kvstore_pb2_grpc.KvStoreStub(channels.to(address, "store")))
        try:
            yield client
        finally:
            for call in client.calls:
                call.cancel()
            if client.memory is not None:
                client.memory.close()


@asynccontextmanager
async def client_of(
    address: str, block_spec: KvSpec | None = None, host: str = HOST, **other: Any
) -> AsyncIterator[StoreClient]:
    async with open_channels() as channels:
        async with open_store(channels.to(address, "store"), "test", block_spec or spec(), host, **other) as store:
            yield store


async def fetch(store: StoreClient, names: Sequence[bytes], block_bytes: int = BLOCK_BYTES) -> list[bytes]:
    """Copies of the stored prefix, in one step."""
    buffers = [memoryview(bytearray(block_bytes)) for _ in names]
    tiers = await store.fetch(names, buffers)
    assert tiers == ["host"] * len(tiers)
    return [bytes(buffer) for buffer in buffers[: len(tiers)]]


async def read(store: StoreClient, names: Sequence[bytes], tier: str = "host") -> list[bytes]:
    """Copies of the stored prefix, all of which should come from `tier`."""
    async with store.lease(names) as leased:
        copies = [bytes(view) for view in leased.blocks]
        assert leased.still_valid()
        assert leased.tiers == [tier] * len(copies)
        return copies


def refusal(error: BaseException) -> tuple[str, str]:
    """Status and text of a failed raw call."""
    assert isinstance(error, grpc.aio.AioRpcError)
    return error.code().name, error.details() or ""


class StoreProcess:
    """A store in a process of its own."""

    def __init__(self, host_bytes: int = 1 << 20, *more: str) -> None:
        """`more` are further arguments of its command line."""
        self._host_bytes, self._more = host_bytes, more
        self._start("127.0.0.1:0")

    def _start(self, address: str) -> None:
        self._ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            "penstock.kvstore",
            "--address",
            address,
            "--host-bytes",
            str(self._host_bytes),
        ]
        with theirs:
            self.process = subprocess.Popen(
                [*command, "--host-id", HOST, "--cooling-s", "0.05", *self._more],
                env={**os.environ, SUPERVISOR_FD: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stderr=subprocess.DEVNULL,
            )
        with self._ours.makefile() as lines:
            self.address: str = json.loads(lines.readline())["address"]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> None:
        self.kill()
        self._ours.close()

    def restart(self) -> None:
        """Another process at the same address."""
        self.close()
        self._start(self.address)


class FakeTier:
    """A tier that a test gives a store, with nothing in it and no will of its own."""

    kind = TierKind.NVME
    spec: KvSpec | None = None

    def suppliers(self, wish: Wish) -> Sequence[Supplier]:
        return (self,)

    def has_blocks(self, keys: Sequence[bytes]) -> int:
        return 0

    async def bring_blocks(self, keys: Sequence[bytes], room: Room, until: float) -> int:
        return 0

    def find_block(self, key: bytes) -> Block | None:
        return None

    def stored_keys(self) -> Iterable[bytes]:
        return ()

    def promise_blocks(self, keys: Sequence[bytes], seconds: float, namespace: bytes) -> Grant:
        return Grant()

    def renew_promises(self, keys: Sequence[bytes]) -> None: ...

    def touch_blocks(self, keys: Sequence[bytes], session: str) -> None: ...

    def expect_session(self, session: str, hint: ReturnHint) -> None: ...

    async def drop_tenant(self, namespace: bytes) -> Dropped:
        return Dropped(self.kind)

    def figures(self) -> dict[str, int]:
        return {}


_JOINED: list[object] = []


def join(store: KvStore, tier: FakeTier) -> None:
    """Gives a store one tier more, for as long as it lives."""
    joined = store.store.tiers.keeping(tier)
    joined.__enter__()
    _JOINED.append(joined)


def disk_tier(store: KvStore) -> DiskTier:
    """The tier on the disk. Raises StopIteration while there is none."""
    return next(tier for tier in store.store.tiers.kept if isinstance(tier, DiskTier))


def disk_has(store: KvStore, names: Sequence[bytes]) -> int:
    """How many leading blocks the disk could give now."""
    return max((tier.has_blocks(names) for tier in store.store.tiers.kept if tier.kind is TierKind.NVME), default=0)
