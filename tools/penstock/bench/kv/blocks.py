"""Blocks to store, and stores to put them into."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from penstock.bench.kv.processes import HOST
from penstock.kv.client.client import BlockPut, StoreClient, open_store
from penstock.kv.sealing import sealed
from penstock.kv.spec import KvSpec
from penstock.rpc.channels import open_channels
from penstock.v1 import kvstore_pb2, kvstore_pb2_grpc

ROOT = bytes(32)
_TIMEOUT_S = 60.0


def spec(block_bytes: int) -> KvSpec:
    """A spec that belongs to no model."""
    return KvSpec(
        model="00" * 32, tokenizer="00" * 32, layout="bench", dtype="float32", block_size=16, block_bytes=block_bytes
    )


def names(count: int, chain: str) -> list[bytes]:
    """Keys of one chain of blocks."""
    return [hashlib.sha256(f"{chain}/{number}".encode()).digest() for number in range(count)]


def puts(keys: Sequence[bytes], data: Sequence[memoryview]) -> list[BlockPut]:
    """The puts of a chain of blocks; the data repeat when they are used up."""
    return [BlockPut(key, keys[at - 1] if at else ROOT, at * 16, data[at % len(data)]) for at, key in enumerate(keys)]


@asynccontextmanager
async def client_of(
    address: str, block_bytes: int, host: str = HOST, *, seals: bool = False
) -> AsyncIterator[StoreClient]:
    """A client with a channel of its own."""
    blocks = sealed(spec(block_bytes)) if seals else spec(block_bytes)
    async with open_channels() as channels:
        async with open_store(channels.to(address, "store"), "bench", blocks, host, timeout_s=_TIMEOUT_S) as client:
            assert client.connected, client.reason
            yield client


async def stats_of(address: str) -> kvstore_pb2.StatsResponse:
    """The figures of a store."""
    async with open_channels() as channels:
        stub: Any = kvstore_pb2_grpc.KvStoreStub(channels.to(address, "store"))
        stats: kvstore_pb2.StatsResponse = await stub.Stats(kvstore_pb2.StatsRequest())
        return stats
