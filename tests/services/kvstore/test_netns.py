"""Two stores on two hosts, as far as the network is concerned: real processes, a real cable, cut, slow and lossy."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from tests.services.kvstore.helpers import Raw, client_of, keys, puts, raw, spec
from tests.services.kvstore.netns import Network, impossible, network

from penstock.v1 import common_pb2, kvstore_pb2

MIB = 1 << 20
SLOW = ("tbf", "rate", "400mbit", "burst", "64kb", "latency", "50ms")
COUNT = 48
WHY_NOT = impossible()

pytestmark = [pytest.mark.mesh, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "possible")]


@dataclass
class Hosts:
    """Two hosts; `a` has a chain of blocks, `b` none."""

    network: Network
    source: str
    reader: Raw
    """Of b's store."""
    blocks: list[Any]

    async def lease(self) -> list[tuple[int, bytes]]:
        """Tier and bytes of what b's store gives."""
        attachment = self.reader.attached.attachment_id
        request = kvstore_pb2.LeaseRequest(attachment_id=attachment, keys=keys(COUNT), sources=[self.source])
        answer = await self.reader.stub.Lease(request)
        assert self.reader.memory is not None
        found = [
            (tier, bytes(self.reader.memory.block(offset, answer.length)))
            for tier, offset in zip(answer.tiers, answer.offsets, strict=True)
        ]
        if answer.lease_id:
            await self.reader.stub.Release(
                kvstore_pb2.ReleaseRequest(attachment_id=attachment, lease_ids=[answer.lease_id])
            )
        return found

    async def pulled(self, when: Callable[[kvstore_pb2.PullStats], object]) -> kvstore_pb2.PullStats:
        """b's figures of its pulls once they are as they should become."""
        return (await self.reader.settle(lambda stats: when(stats.pull))).pull

    def right(self, found: list[tuple[int, bytes]]) -> bool:
        """Whether the bytes are those of the leading blocks."""
        return [data for _, data in found] == [bytes(block.data) for block in self.blocks[: len(found)]]


@asynccontextmanager
async def hosts(bring_s: float = 30.0) -> AsyncIterator[Hosts]:
    size = (COUNT + 8) * MIB
    async with AsyncExitStack() as stack:
        net = stack.enter_context(network())
        options = ["--bring-s", str(bring_s), "--stall-s", "0.5", "--peers", net.a_from_b]
        net.store("a", size)
        net.store("b", size, *options)
        writer = await stack.enter_async_context(client_of(net.from_here("a"), spec(MIB), host="a", timeout_s=20))
        blocks = puts(COUNT, block_bytes=MIB)
        assert await writer.put(blocks) == COUNT
        reader = await stack.enter_async_context(raw(net.from_here("b")))
        await reader.attach(spec(MIB))
        reader.map()
        yield Hosts(net, net.a_from_b, reader, blocks)


async def test_a_cut_cable_that_is_mended_costs_time_and_not_a_byte_twice() -> None:
    async with hosts() as two:
        two.network.shape(*SLOW)
        leasing = asyncio.ensure_future(two.lease())
        await two.pulled(lambda pull: pull.pulled_bytes > 5 * MIB)
        two.network.cut()
        await two.pulled(lambda pull: pull.resumptions > 0)  # it was noticed
        two.network.mend()
        found = await leasing
        assert len(found) == COUNT
        assert two.right(found)
        assert {tier for tier, _ in found} == {common_pb2.TIER_REMOTE}
        pull = await two.pulled(lambda pull: True)
        assert pull.pulled_bytes == COUNT * MIB, "what had arrived was not sent again"
        assert pull.resumed_bytes > 4 * MIB
        assert not pull.faults


async def test_a_cable_that_stays_cut_leaves_a_right_prefix_and_heals_without_a_restart() -> None:
    async with hosts() as two:
        two.network.shape(*SLOW)
        leasing = asyncio.ensure_future(two.lease())
        await two.pulled(lambda pull: pull.pulled_bytes > 5 * MIB)
        two.network.cut()
        found = await asyncio.wait_for(leasing, 20)
        assert 4 < len(found) < COUNT
        assert two.right(found)
        assert (await two.reader.stats()).reserved == 0
        assert sum((await two.pulled(lambda pull: True)).faults.values()) == 1
        two.network.mend()
        async with asyncio.timeout(20):  # the source is left alone for a few seconds
            while len(again := await two.lease()) < COUNT:
                await asyncio.sleep(0.05)
        assert two.right(again)
        assert [tier for tier, _ in again[: len(found)]] == [common_pb2.TIER_HOST] * len(found)


async def test_loss_and_delay() -> None:
    """netem where the kernel has it; else a token bucket whose queue is so short that it drops."""
    async with hosts() as two:
        try:
            two.network.shape("netem", "delay", "5ms", "loss", "1%")
        except subprocess.CalledProcessError:
            two.network.shape("tbf", "rate", "400mbit", "burst", "16kb", "limit", "20kb")
        found = await two.lease()
        assert len(found) == COUNT
        assert two.right(found)
        assert two.network.dropped() > 0


async def test_the_other_store_is_killed_in_the_middle_and_comes_back_empty() -> None:
    async with hosts() as two:
        two.network.shape(*SLOW)
        leasing = asyncio.ensure_future(two.lease())
        await two.pulled(lambda pull: pull.pulled_bytes > 5 * MIB)
        two.network.processes["a"].kill()
        found = await asyncio.wait_for(leasing, 20)
        assert 4 < len(found) < COUNT
        assert two.right(found)
        two.network.processes["a"].wait(10)
        two.network.store("a", 16 * MIB)
        again = await two.lease()
        assert len(again) == len(found), "there is nothing to be had there, and that is no fault of anybody"
