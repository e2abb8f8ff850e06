"""Host memory and the disk together, real bytes and real files, in any order of events that Hypothesis finds.

The reference is a set of keys per tier, and what each block must hold. `test_store_machine` is about one table and
who goes when; this is about what a client may ever see: the right bytes or nothing, whatever was moved, overwritten
late, damaged, cut off or restarted in between.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.services.kvstore.disk.disks import SLOT, Bench, CutFiles, Killed, bench, slabs
from tests.services.kvstore.helpers import BLOCK_BYTES, ROOT

from penstock.kv.bytes.checksum import checksum
from penstock.kvstore.table.blocks import Block, Lease, TierKind, Wanted, Written
from penstock.kvstore.tiers.bringing import Bringer
from penstock.kvstore.tiers.disk.files import Files
from penstock.kvstore.tiers.disk.format import PAGE
from penstock.runtime.threads import started_threads

HOST_SLOTS, DISK_SLOTS = 6, 9
COOLING_S = 4.0
CHAINS, LENGTH = 3, 5
Result = TypeVar("Result")


def _content(key: bytes) -> bytes:
    return random.Random(key).randbytes(BLOCK_BYTES)


KEYS = [[random.Random(f"{chain}/{at}").randbytes(32) for at in range(LENGTH)] for chain in range(CHAINS)]
RIGHT = {key: _content(key) for chain in KEYS for key in chain}
CHAIN = st.integers(0, CHAINS - 1)
COUNT = st.integers(1, LENGTH)


class TiersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(started_threads(2, "job"))  # as a service does
        self.path = Path(tempfile.mkdtemp())
        self.attachments = 0
        self.damaged: set[bytes] = set()
        """Keys whose bytes on the disk are not what they were."""
        self.late: list[tuple[Block, float]] = []
        """Reservations that are over, whose client may still write, and until when their slots rest."""
        self.open: AbstractAsyncContextManager[Bench] | None = None

    @initialize()
    def begin(self) -> None:
        self.start(Files())

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 10))

    def start(self, files: Files) -> None:
        self.open = bench(self.path, files, slots=DISK_SLOTS, host_slots=HOST_SLOTS, cooling_s=COOLING_S)
        self.bed = self.run(self.opened(self.open))
        self.bringer = Bringer(self.bed.host, self.bed.arena, self.bed.now, print)
        self.attachment = self.attach()
        self.leases: list[int] = []
        self.late.clear()

    async def opened(self, bed: AbstractAsyncContextManager[Bench]) -> Bench:
        """A task of the test's own: nobody is served while it opens."""
        return await bed.__aenter__()

    def stop(self) -> None:
        if self.open is not None:
            self.run(self.open.__aexit__(None, None, None))
        self.open = None

    def attach(self) -> str:
        self.attachments += 1
        self.bed.host.attach(f"s{self.attachments}", "test")
        return f"s{self.attachments}"

    @property
    def host(self) -> set[bytes]:
        return set(self.bed.host.keys())

    @property
    def disk(self) -> set[bytes]:
        return set(self.bed.disk.table.keys())

    def write(self, block: Block, data: bytes) -> None:
        view = self.bed.arena.block(block.slot, BLOCK_BYTES)
        view[:] = data
        view.release()

    # -- clients

    def reserve(self, chain: int, count: int) -> list[Block]:
        wanted = [
            Wanted(key, KEYS[chain][at - 1] if at else ROOT, at * 16) for at, key in enumerate(KEYS[chain][:count])
        ]
        answers = self.bed.host.puts.reserve(self.attachment, wanted, self.bed.now())
        return [answer.block for answer in answers if answer.block is not None]

    @rule(chain=CHAIN, count=COUNT)
    def put(self, chain: int, count: int) -> None:
        for block in self.reserve(chain, count):
            self.write(block, RIGHT[block.key])
            done = Written(block.key, block.epoch, checksum(RIGHT[block.key]))
            assert self.bed.host.puts.commit(self.attachment, [done], self.bed.now()) == [True]

    @rule(chain=CHAIN, count=COUNT)
    def vanish_while_writing(self, chain: int, count: int) -> None:
        """The attachment ends between reserve and commit; its client does not know it yet."""
        before = self.host
        late = self.reserve(chain, count)
        self.bed.host.detach(self.attachment, self.bed.now())
        self.late += [(block, self.bed.now() + COOLING_S) for block in late]
        self.attachment, self.leases = self.attach(), []
        assert not {block.key for block in late} & (self.host - before)

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def late_write(self, data: st.DataObject) -> None:
        """Into a slot that is at rest. Later its epoch has changed, and a client looks at it before it writes."""
        block, until = data.draw(st.sampled_from(self.late))
        if self.bed.now() < until:
            self.write(block, b"\xee" * BLOCK_BYTES)
        done = Written(block.key, block.epoch, checksum(RIGHT[block.key]))
        assert self.bed.host.puts.commit(self.attachment, [done], self.bed.now()) == [False]

    @rule(chain=CHAIN, count=COUNT, release=st.booleans())
    def lease(self, chain: int, count: int, release: bool) -> None:
        """Everything that is leased is right; and all that can be found is leased when there is room for it."""
        names, host = KEYS[chain][:count], self.bed.host
        before, disk = self.host, self.disk
        found = next((at for at, name in enumerate(names) if name not in before | disk), count)
        sound = next((at for at, name in enumerate(names) if name not in before and name in self.damaged), count)
        lease = host.leases.take(self.attachment, names, 100, self.bed.now(), grows=True)
        assert lease is not None
        promoted = {name for name in names[:found] if name not in before}
        self.run(self.fill(lease, names))
        settled = host.leases.settle(lease, count, self.bed.now())
        blocks = settled.blocks if settled else []
        for at, block in enumerate(blocks):
            assert block.key == names[at]
            view = self.bed.arena.block(block.slot, BLOCK_BYTES)
            assert bytes(view) == RIGHT[block.key]
            view.release()
            assert lease.brought.get(at, TierKind.HOST) is (TierKind.NVME if block.key in promoted else TierKind.HOST)
        assert len(blocks) <= min(found, sound)
        if not self.leases and not host.stats().cooling and not host.stats().detached:
            assert len(blocks) == min(found, sound)
        if settled is not None and release:
            host.leases.release(self.attachment, [lease.lease_id], self.bed.now())
        elif settled is not None:
            self.leases.append(lease.lease_id)

    async def fill(self, lease: Lease, names: list[bytes]) -> None:
        await self.bringer.fill(lease, names, [self.bed.disk], self.bed.now() + 5)
        await self.bringer.idle()
        await self.bed.disk.sync()  # behind it, damaged slots are empty

    @rule()
    def release(self) -> None:
        self.bed.host.leases.release(self.attachment, self.leases, self.bed.now())
        self.leases.clear()

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.bed.clock[0] += seconds
        self.bed.host.expire(self.bed.now())

    # -- the store

    def demote(self, count: int) -> None:
        """As the mover does: pinned while it is copied."""
        host = self.bed.host
        chosen = [name for name in sorted(self.host) if not self.bed.disk.holds(name)][:count]
        held = [block for block in map(host.hold, chosen) if block is not None]
        views = [self.bed.arena.block(block.slot, BLOCK_BYTES) for block in held]
        try:
            self.run(self.bed.disk.write(list(zip(held, views, strict=True))))
        finally:
            for block, view in zip(held, views, strict=True):
                view.release()
                host.drop(block, self.bed.now())
        self.damaged &= self.disk - set(chosen)

    @rule(count=st.integers(1, HOST_SLOTS))
    def demote_some(self, count: int) -> None:
        self.demote(count)

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """A byte of a block rots on the disk."""
        stored = sorted(self.disk)
        if stored:
            block = self.bed.disk.table.find(data.draw(st.sampled_from(stored)))
            assert block is not None
            with slabs(self.path)[0].open("r+b") as file:
                at = block.slot * SLOT + PAGE + data.draw(st.integers(0, BLOCK_BYTES - 1))
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 0x55]))  # a second time it is right again
            self.inspect(block)

    def inspect(self, block: Block) -> None:
        """Looks behind the tier's back whether a block is what it should be."""
        with slabs(self.path)[0].open("rb") as file:
            file.seek(block.slot * SLOT + PAGE)
            sound = file.read(BLOCK_BYTES) == RIGHT[block.key]
        (self.damaged.discard if sound else self.damaged.add)(block.key)

    def restarted(self, before: set[bytes]) -> None:
        """What was on the disk is on it; besides perhaps evicted blocks whose slots were not written to since."""
        assert before <= self.disk
        for name in self.disk:
            block = self.bed.disk.table.find(name)
            assert block is not None
            self.inspect(block)
        assert not self.host

    @rule()
    def crash(self) -> None:
        before = self.disk
        self.stop()
        self.start(Files())
        self.restarted(before)

    @rule(count=st.integers(1, HOST_SLOTS), left=st.integers(0, 3 * SLOT + 3 * PAGE))
    def crash_while_demoting(self, count: int, left: int) -> None:
        self.stop()
        self.start(CutFiles(left))
        for chain in range(CHAINS):
            self.put(chain, 2)
        before, safe = self.disk, self.disk
        try:
            self.demote(count)
        except Killed:
            safe = {name for name in before if self.bed.disk.holds(name)}
        before = safe & self.disk
        self.stop()
        self.start(Files())
        self.restarted(before)

    # -- what always holds

    @invariant()
    def agree(self) -> None:
        if self.open is None:
            return
        host, disk = self.bed.host.stats(), self.bed.stats()
        assert host.used_bytes == (host.blocks + host.reserved + host.detached) * BLOCK_BYTES
        assert disk.used_bytes == disk.blocks * SLOT, "nothing is half written when nothing is being written"
        for find, names, slots in (
            (self.bed.host.find, self.host, HOST_SLOTS),
            (self.bed.disk.table.find, self.disk, DISK_SLOTS),
        ):
            taken = [block.slot for block in map(find, names) if block is not None]
            assert len(set(taken)) == len(names) <= slots, "one slot, one block"
        for name in self.host:
            block = self.bed.host.find(name)
            assert block is not None
            view = self.bed.arena.block(block.slot, BLOCK_BYTES)
            assert view == RIGHT[name], "no late write is visible"
            view.release()
        assert self.bringer.flights == 0

    def teardown(self) -> None:
        if self.open is not None:
            self.bed.host.detach(self.attachment, self.bed.now())
            self.bed.host.expire(self.bed.now() + 100)
            stats = self.bed.host.stats()
            assert (stats.reserved, stats.detached, stats.cooling, stats.leases) == (0, 0, 0, 0)
        self.stop()
        self.loop.close()
        shutil.rmtree(self.path)


TiersMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
TestTiers = TiersMachine.TestCase
