"""Two stores of one mesh, with a relay between them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.services.kvstore.helpers import client_of, raw, settings, spec
from tests.services.kvstore.relay import Relay, relay_to

from penstock.kv.client.client import StoreClient
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.v1 import common_pb2, kvstore_pb2


@dataclass
class Two:
    """Two stores of one mesh, and the way from the second to the first."""

    first: KvStore
    second: KvStore
    relay: Relay
    writer: StoreClient
    """Of the first."""
    stack: AsyncExitStack
    block_bytes: int

    async def lease(self, names: Sequence[bytes], sources: Sequence[str] | None = None) -> list[tuple[int, bytes]]:
        """Tier and bytes of the blocks that the second store gives, from a client of its own."""
        client = await self.stack.enter_async_context(raw(self.second.address))
        attachment = await client.attach(spec(self.block_bytes))
        where = [self.relay.address] if sources is None else sources
        request = kvstore_pb2.LeaseRequest(attachment_id=attachment, keys=names, sources=where)
        answer = await client.stub.Lease(request)
        memory = client.map()
        found = [
            (tier, bytes(memory.block(offset, answer.length)))
            for tier, offset in zip(answer.tiers, answer.offsets, strict=True)
        ]
        if answer.lease_id:
            await client.stub.Release(kvstore_pb2.ReleaseRequest(attachment_id=attachment, lease_ids=[answer.lease_id]))
        return found

    @property
    def figures(self) -> dict[str, Any]:
        return self.second.elsewhere.figures()

    @property
    def faults(self) -> dict[str, int]:
        return dict(self.second.elsewhere.faults)


@asynccontextmanager
async def two(block_bytes: int = 4096, blocks: int = 64, lease_s: float = 30.0, **other: Any) -> AsyncIterator[Two]:
    """The settings are those of the second; `lease_s` is the first's."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        options: dict[str, Any] = {"stall_s": 0.3, "bring_s": 10.0}
        first = await enter(open_kvstore(settings(blocks, block_bytes, host_id="one", lease_s=lease_s)))
        relay = await enter(relay_to(first.address))
        config = settings(blocks, block_bytes, peers=(relay.address,), **(options | other))
        second = await enter(open_kvstore(config))
        writer = await enter(client_of(first.address, spec(block_bytes), timeout_s=10))
        yield Two(first, second, relay, writer, stack, block_bytes)


def contents(blocks: list[Any]) -> list[tuple[int, bytes]]:
    """What `Two.lease` gives when all blocks come from the first store."""
    return [(common_pb2.TIER_REMOTE, bytes(block.data)) for block in blocks]
