"""The two nearest tiers under any order of events: what can be found is right, and every slot has one owner.

The reference is as naive as can be: the content of a block is a function of its key. After every step all that can be
found in either tier is read and compared, which is what no client could afford.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Iterator
from contextlib import AsyncExitStack
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.services.kvstore.device.helpers import BLOCK, gpu_settings
from tests.services.kvstore.helpers import ROOT, spec

from penstock.kv.bytes.checksum import checksum
from penstock.kvstore.service import rules_of
from penstock.kvstore.sessions import SessionTable
from penstock.kvstore.store import Store, open_store
from penstock.kvstore.table.blocks import Block, Lease, ReserveState, Wanted, Written
from penstock.kvstore.tiers.base import Wish
from penstock.kvstore.tiers.device.opening import open_device_tier
from penstock.kvstore.tiers.device.readers import DeviceReaders
from penstock.kvstore.tiers.device.tier import DeviceTier
from penstock.kvstore.tiers.host import open_host
from penstock.kvstore.tiers.tiers import Tiers
from penstock.testing.twin import TwinDevice, TwinSwitch

CHAINS = st.integers(0, 4)
COUNTS = st.integers(1, 8)


def chain(number: int, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{number} {at}".encode()).digest() for at in range(count)]


def content(key: bytes) -> bytes:
    return key * (BLOCK // len(key))


class GpuMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.switch = TwinSwitch()
        self.stack = AsyncExitStack()
        self.live: dict[str, tuple[list[Lease], list[Lease]]] = {}
        """Attachments, and their leases in host memory and on the device."""

    def go(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)

    @initialize()
    def start(self) -> None:
        async def begin() -> None:
            config = gpu_settings(16, 16, lease_s=600, bring_s=0.02, cooling_s=0.0)
            sessions, tiers, enter = SessionTable(), Tiers(), self.stack.enter_async_context
            rules = rules_of(config, lambda name: None)
            host = await enter(open_host(config, tiers, rules))
            opening = open_device_tier(config, host, sessions, tiers=tiers, rules=rules, open_device=self._device)
            self.gpu: DeviceTier = await enter(opening)
            self.readers = DeviceReaders(self.gpu.blocks, rules.now)
            self.store: Store = await enter(open_store(config, tiers, host, sessions=sessions, rules=rules))
            self.attachment()

        self.go(begin())
        place = self.gpu.blocks.place()
        assert place is not None
        self.memory = TwinDevice().open(place.handle, place.arena_bytes)

    def _device(self, index: int) -> TwinDevice:
        return TwinDevice(index, self.switch)

    def attachment(self) -> str:
        name = self.store.attach("test", spec(BLOCK))
        self.readers.attach(name, "test")
        self.live[name] = [], []
        return name

    def pick(self, number: int) -> str:
        return list(self.live)[number % len(self.live)]

    # -- clients

    @rule(number=CHAINS, count=COUNTS, whole=st.booleans())
    def put(self, number: int, count: int, whole: bool) -> None:
        async def act() -> None:
            table, attachment, names = self.store.host.table, self.pick(0), chain(number, count)
            wanted = [Wanted(name, names[at - 1] if at else ROOT, at * 16) for at, name in enumerate(names)]
            for answer in table.puts.reserve(attachment, wanted, self.store.now()):
                if answer.state is ReserveState.WRITE:
                    block = answer.block
                    assert block is not None
                    if whole:
                        self.store.host.arena.block(block.slot, BLOCK)[:] = content(block.key)
                    written = Written(block.key, block.epoch, checksum(content(block.key)) if whole else b"")
                    assert table.puts.commit(attachment, [written], self.store.now()) == [True]

        self.go(act())

    @rule(number=CHAINS, count=COUNTS, who=st.integers(0, 3), session=st.sampled_from(["", "a", "b"]))
    def lease(self, number: int, count: int, who: int, session: str) -> None:
        async def act() -> None:
            attachment, names = self.pick(who), chain(number, count)
            self.store.sessions.used(session, self.store.now())
            lease = await self.store.lease(attachment, names, Wish(session), seconds=600, wait_s=1)
            if lease is not None:
                assert [block.key for block in lease.blocks] == names[: len(lease.blocks)]
                self.live[attachment][0].append(lease)
            await asyncio.sleep(0)

        self.go(act())

    @rule(number=CHAINS, count=COUNTS, who=st.integers(0, 3))
    def lease_on_device(self, number: int, count: int, who: int) -> None:
        attachment, names = self.pick(who), chain(number, count)
        lease = self.readers.lease(attachment, names, 600, "")
        if lease is not None:
            assert [block.key for block in lease.blocks] == names[: len(lease.blocks)]
            self.live[attachment][1].append(lease)

    @rule(who=st.integers(0, 3))
    def release(self, who: int) -> None:
        async def act() -> None:
            attachment = self.pick(who)
            host, device = self.live[attachment]
            if host:
                ids = [host.pop().lease_id]
                assert self.store.host.table.leases.release(attachment, ids, self.store.now()) == [True]
            if device:
                assert self.readers.release(attachment, [device.pop().lease_id]) == [True]

        self.go(act())

    @rule()
    def attach(self) -> None:
        if len(self.live) < 4:
            self.attachment()

    @rule(who=st.integers(0, 3))
    def crash(self, who: int) -> None:
        async def act() -> None:
            if len(self.live) > 1:
                attachment = self.pick(who)
                del self.live[attachment]
                self.readers.detach(attachment)
                self.store.detach(attachment, "test")

        self.go(act())

    # -- the device

    @rule(after=st.integers(0, 6), piece=st.sampled_from([700, 1 << 30]))
    def stall(self, after: int, piece: int) -> None:
        self.switch.piece_bytes = piece
        self.switch.hold(after)

    @rule()
    def resume(self) -> None:
        self.switch.release()

    @rule(count=st.integers(1, 2))
    def fail(self, count: int) -> None:
        self.switch.fail(count)

    @rule()
    def flip(self) -> None:
        self.switch.flip()

    @rule()
    def quiesce(self) -> None:
        """Whatever is under way ends."""

        async def act() -> None:
            self.switch.release()
            async with asyncio.timeout(20):
                while self.gpu.working or self.store.host.table.stats().reserved:
                    await asyncio.sleep(0.0005)

        self.go(act())

    @rule(turns=st.integers(1, 20))
    def a_while(self, turns: int) -> None:
        async def act() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.go(act())

    # -- what must hold

    def on_device(self) -> Iterator[Block]:
        form = self.gpu.blocks.form
        for key in list(self.gpu.stored_keys()):
            block = form.table.find(key)
            assert block is not None
            yield block

    @invariant()
    def what_can_be_found_is_right(self) -> None:
        if not self.live:
            return
        table = self.store.host.table
        for key in list(table.keys()):
            block = table.find(key)
            assert block is not None and self.store.host.arena.block(block.slot, BLOCK) == content(key)
        for block in self.on_device():
            offset = self.readers.offset(block)
            assert self.memory._memory[offset : offset + BLOCK] == content(block.key)

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        if not self.live:
            return
        form = self.gpu.blocks.form
        blocks = list(self.on_device())
        assert len({block.slot for block in blocks}) == len(blocks)
        stats = form.table.stats()
        assert stats.used_bytes == (len(blocks) + stats.reserved + stats.detached) * BLOCK
        for block in blocks:
            assert form.epochs._entries[block.slot] == block.epoch

    @invariant()
    def what_is_leased_stays(self) -> None:
        for _, leases in self.live.values():
            for block in (block for lease in leases for block in lease.blocks):
                assert block.pins > 0
                offset = self.readers.offset(block)
                assert self.memory._memory[offset : offset + BLOCK] == content(block.key)

    def teardown(self) -> None:
        """Everybody leaves: nothing is held, and what is there is whole."""
        if not self.live:
            return

        async def end() -> None:
            self.switch.release()
            async with asyncio.timeout(20):
                while self.gpu.working or self.store.host.table.stats().reserved:
                    await asyncio.sleep(0.0005)
            for attachment in list(self.live):
                self.readers.detach(attachment)
                self.store.detach(attachment, "test")
            self.live.clear()
            host, device = self.store.stats(), self.gpu.stats()
            assert (host.leases, host.reserved, device.leases, self.gpu.busy) == (0, 0, 0, False)
            assert device.used_bytes == device.blocks * BLOCK
            assert self.store.host.table.idle or host.cooling
            self.memory.close()
            await self.stack.aclose()

        self.go(end())
        self.loop.close()


GpuMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
TestGpu = GpuMachine.TestCase
