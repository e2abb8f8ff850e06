"""Disks that fail on command, and what the tests of the disk tier share."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.services.kvstore.helpers import BLOCK_BYTES, HOST, eventually, puts, spec

from penstock.kv.bytes.arena import Arena, Layout
from penstock.kv.bytes.checksum import checksum
from penstock.kv.client.client import BlockPut, StoreClient
from penstock.kv.spec import KvSpec
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.service import KvStore
from penstock.kvstore.table.blocks import Block, Wanted, Written
from penstock.kvstore.table.table import BlockTable
from penstock.kvstore.tiers.base import Room
from penstock.kvstore.tiers.disk.blocks import DiskBlocks
from penstock.kvstore.tiers.disk.files import Files
from penstock.kvstore.tiers.disk.format import PAGE
from penstock.kvstore.tiers.disk.options import NvmeOptions
from penstock.kvstore.tiers.disk.spaces import Spaces
from penstock.kvstore.tiers.disk.stats import NvmeStats
from penstock.v1 import kvstore_pb2

SLOT = PAGE + BLOCK_BYTES


class Killed(BaseException):
    """The process is gone."""


class CutFiles(Files):
    """Writes a number of bytes more, then the process is gone: what was written so far stays, page by page."""

    def __init__(self, left: int) -> None:
        self.left = left

    def write(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        data = b"".join(buffers)[: max(0, self.left)]
        whole = sum(buffer.nbytes for buffer in buffers)
        self.left -= whole
        if data:
            os.pwrite(fd, data, at)
        if self.left < 0:
            raise Killed
        return whole


class FaultyFiles(Files):
    """Fails as told: `write_error` and `read_error` are errnos, `bad` are offsets that can't be read."""

    def __init__(self) -> None:
        self.write_error = self.read_error = self.allocate_error = 0
        self.bad: set[int] = set()
        self.writes = self.reads = 0

    def write(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        self.writes += 1
        if self.write_error:
            raise OSError(self.write_error, os.strerror(self.write_error))
        return super().write(fd, buffers, at)

    def read(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        self.reads += 1
        end = at + sum(buffer.nbytes for buffer in buffers)
        if self.read_error or any(at <= bad < end for bad in self.bad):
            raise OSError(self.read_error or errno.EIO, "bad")
        return super().read(fd, buffers, at)

    def allocate(self, fd: int, size: int) -> None:
        if self.allocate_error:
            raise OSError(self.allocate_error, os.strerror(self.allocate_error))
        super().allocate(fd, size)


class Nobody:
    def block_stored(self, block: Block) -> None: ...

    def block_removed(self, block: Block) -> None: ...

    def slot_held(self, slot: int, epoch: int) -> None: ...


@dataclass
class Bench:
    """An open space of a disk with host memory beside it, and no service around them."""

    spaces: Spaces
    disk: DiskBlocks
    arena: Arena
    host: BlockTable
    clock: list[float]

    def now(self) -> float:
        return self.clock[0]

    def stats(self) -> NvmeStats:
        return replace(self.spaces.condition.stats(), **self.disk.figures())

    def put(self, blocks: Sequence[BlockPut], **more: Any) -> list[Block]:
        """Stores blocks in host memory."""
        stored = []
        for put in blocks:
            block = self.host.puts.reserve_own(Wanted(put.key, put.parent, put.first_token, **more), self.now()).block
            assert block is not None
            view = self.arena.block(block.slot, put.data.nbytes)
            view[:] = put.data
            view.release()
            assert self.host.puts.commit_own(Written(put.key, block.epoch, checksum(put.data)), self.now())
            stored.append(block)
        return stored

    async def write(self, blocks: Sequence[BlockPut], **more: Any) -> int:
        """Through host memory to the disk, and out of host memory."""
        stored = self.put(blocks, **more)
        views = [self.arena.block(block.slot, self.host.block_bytes) for block in stored]
        try:
            return await self.disk.write(list(zip(stored, views, strict=True)))
        finally:
            for view in views:
                view.release()
            for block in stored:
                self.host.condemn(block.key, block.epoch, self.now())
            self.host.expire(self.now() + 1)

    async def bring(self, names: Sequence[bytes]) -> list[bytes]:
        """What the tier brings of `names`, and out of host memory again."""
        room = Room(self.host, self.arena, self.now, lambda: None)
        try:
            await self.disk.bring_blocks(names, room, self.now() + 10)
        finally:
            room.close()
        found = []
        for name in names[: self.host.lookup(names)]:
            block = self.host.find(name)
            assert block is not None
            view = self.arena.block(block.slot, self.host.block_bytes)
            found.append(bytes(view))
            view.release()
            assert checksum(found[-1]) == block.checksum
        for name in names:
            if (block := self.host.find(name)) is not None:
                self.host.condemn(name, block.epoch, self.now())
        self.host.expire(self.now() + 1)
        return found


@contextmanager
def spaces_of(
    path: Path, files: Files | None = None, slot_bytes: int = SLOT, *, slots: int = 64, **options: Any
) -> Iterator[tuple[Spaces, list[float]]]:
    """A directory with room for `slots` blocks, and its clock."""
    clock = [1.0]
    settings: dict[str, Any] = {
        "directory": path,
        "total": slots * slot_bytes,
        "per_s": 1 << 30,
        "per_day": 1 << 40,
        "direct": False,
    }
    spaces = Spaces(NvmeOptions(**(settings | options)), lambda: clock[0], files=files)
    try:
        yield spaces, clock
    finally:
        spaces.close()


@asynccontextmanager
async def opened(
    spaces: Spaces, clock: list[float], block_spec: KvSpec, *, host_slots: int = 64, cooling_s: float = 0.0
) -> AsyncIterator[Bench]:
    """The space of one spec."""
    arena = Arena(8192 + host_slots * (Layout.fit(1 << 20, block_spec.block_bytes).stride + 8))
    arena.format(Layout.fit(arena.size, block_spec.block_bytes))
    host = BlockTable(arena.layout.slots, block_spec.block_bytes, Nobody(), cooling_s=cooling_s)
    try:
        await spaces.last_specs()
        async with spaces.opened(block_spec) as disk:
            await spaces.save(block_spec)
            yield Bench(spaces, disk, arena, host, clock)
    finally:
        arena.close()


@asynccontextmanager
async def bench(
    path: Path,
    files: Files | None = None,
    block_spec: KvSpec | None = None,
    *,
    host_slots: int = 64,
    cooling_s: float = 0.0,
    **options: Any,
) -> AsyncIterator[Bench]:
    """A space with room for `slots` blocks, open for `block_spec`."""
    block_spec = block_spec or spec()
    size = PAGE + -(-block_spec.block_bytes // PAGE) * PAGE
    with spaces_of(path, files, size, **options) as (spaces, clock):
        async with opened(spaces, clock, block_spec, host_slots=host_slots, cooling_s=cooling_s) as bed:
            yield bed


def contents(count: int, chain: str = "a", block_bytes: int = BLOCK_BYTES) -> dict[bytes, bytes]:
    """What each block of a chain should hold."""
    return {put.key: bytes(put.data) for put in puts(count, chain, block_bytes)}


def settings(path: Path, blocks: int = 64, disk_blocks: int = 256, **other: Any) -> KvStoreConfig:
    """A store with a disk tier."""
    size = 8192 + blocks * (BLOCK_BYTES + 8)
    defaults: dict[str, Any] = {
        "host_bytes": size,
        "host_id": HOST,
        "cooling_s": 0.05,
        "nvme_dir": path,
        "nvme_bytes": max(1 << 20, disk_blocks * SLOT),
        "bring_s": 5.0,
    }
    return KvStoreConfig(**(defaults | other))


def slabs(path: Path) -> list[Path]:
    """All slab files below a tier's directory."""
    return sorted(path.glob("*/slab-*.blocks"))


def shuffled(names: Sequence[bytes], seed: int) -> list[bytes]:
    result = list(names)
    random.Random(seed).shuffle(result)
    return result


def disk(store: KvStore) -> kvstore_pb2.NvmeStats:
    """The figures of the disk tier."""
    assert store.disk is not None
    return kvstore_pb2.NvmeStats(**store.disk.figures())


async def connected(client: StoreClient) -> None:
    await eventually(lambda: client.connected)
