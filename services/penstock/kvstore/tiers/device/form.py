"""The device arena as it is cut up for one spec, and the copies to and from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from penstock.kv.bytes.arena import Arena
from penstock.kv.device.epochs import EpochTable
from penstock.kv.device.memory import DeviceArena, DeviceFault
from penstock.kv.spec import KvSpec
from penstock.kvstore.table.blocks import Block, TierKind
from penstock.kvstore.table.table import BlockTable
from penstock.kvstore.tiers.alarm import Alarm
from penstock.kvstore.tiers.base import Rules
from penstock.kvstore.tiers.device.copier import Copier, Move
from penstock.kvstore.tiers.tiers import Tiers
from penstock.runtime.threads import started_threads, to_its_end

_ALIGN = 512
"""Of slots, so that a view of any type can begin at one."""
_BATCH_BYTES = 16 << 20
"""Copied together: large enough for full speed, small enough that no copy waits long behind it."""
_PATIENCE = 8
"""Failed copies in a row that turn the tier off."""
_THREADS = 3
"""One to pin host memory, one for copies up, one for copies down."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlace:
    """The data that a client needs to read on the device."""

    uuid: str
    handle: bytes
    arena_bytes: int
    stride: int
    slots: int
    epochs_path: str
    epochs_id: bytes


@dataclass(frozen=True, slots=True)
class _Watch:
    """Passes changes of the device's table on to the other tiers, and to the epochs that clients read."""

    tiers: Tiers
    epochs: EpochTable

    def block_stored(self, block: Block) -> None:
        self.tiers.moved(TierKind.GPU, block.key)

    def block_removed(self, block: Block) -> None:
        self.tiers.moved(TierKind.GPU, block.key)

    def slot_held(self, slot: int, epoch: int) -> None:
        self.epochs.set(slot, epoch)


@dataclass(frozen=True, eq=False)
class DeviceForm:
    """The slots for one spec; without one there are none."""

    spec: KvSpec | None
    table: BlockTable
    epochs: EpochTable
    copier: Copier
    stride: int

    def offset(self, block: Block) -> int:
        """Where a block begins on the device."""
        return block.slot * self.stride

    def moves(self, pairs: Iterable[tuple[Block, memoryview]]) -> list[Move]:
        """Device blocks, and their host memory."""
        return [Move(self.offset(block), view, block.checksum) for block, view in pairs]

    def hide(self) -> None:
        """Clients see that every slot has changed hands."""
        for slot in range(self.table.slots.count):
            self.epochs.set(slot, 0)


class DeviceBlocks:
    """The blocks on the device. The tier turns itself off when the device is lost, or fails again and again."""

    def __init__(self, arena: DeviceArena, uuid: str, tiers: Tiers, rules: Rules) -> None:
        self.off = ""
        """Why the tier turned itself off; empty: it works."""
        self.at_work = 0
        """Copies under way."""
        self.failed_copies = self.corrupt = 0
        self.uuid = uuid
        self._arena = arena
        self._tiers = tiers
        self._rules = rules
        self._in_a_row = 0
        self._threads = started_threads(_THREADS, "penstock-gpu")
        self._alarm = Alarm(rules.now, lambda: self.form.table)
        self._log = structlog.get_logger("penstock.kvstore")
        self.form = self._formed(None, 0, 1)

    def _formed(self, spec: KvSpec | None, slots: int, block_bytes: int) -> DeviceForm:
        epochs = EpochTable(max(1, slots))
        table = BlockTable(
            slots,
            block_bytes,
            _Watch(self._tiers, epochs),
            policy=self._rules.policy,
            promises=self._rules.promises(slots),
            epochs=self._rules.epochs,
            wake=self._alarm.ring_at,
        )
        batch = max(1, min(slots, _BATCH_BYTES // block_bytes))
        return DeviceForm(spec, table, epochs, Copier(self._arena, block_bytes, batch), _stride(block_bytes))

    def format_for(self, spec: KvSpec) -> None:
        """Forgets all blocks, and takes those of `spec` from now on."""
        assert not self.at_work
        slots = 0 if self.off else self._arena.size // _stride(spec.block_bytes)
        self.form.epochs.close()
        self.form = self._formed(spec, slots, spec.block_bytes)
        self._log.info("device memory formatted", slots=slots, device=self.uuid)

    @property
    def arena_bytes(self) -> int:
        """Of the device's memory that is ours."""
        return self._arena.size

    def place(self) -> DevicePlace | None:
        """Where clients of the same device find the blocks; None: no block can be there."""
        form = self.form
        if self.off or not form.table.slots.count:
            return None
        return DevicePlace(
            uuid=self.uuid,
            handle=self._arena.handle,
            arena_bytes=self._arena.size,
            stride=form.stride,
            slots=form.table.slots.count,
            epochs_path=form.epochs.path,
            epochs_id=form.epochs.table_id,
        )

    # -- copies and faults

    @contextmanager
    def working(self) -> Iterator[None]:
        """Something is copied, or about to be: the arena can't be divided again."""
        self.at_work += 1
        try:
            yield
        finally:
            self.at_work -= 1

    async def in_thread(self, job: Callable[[], Result]) -> Result:
        """Also when cancelled, it returns only when the job has ended: until then bytes move. Raises DeviceFault."""
        result = await to_its_end(self._threads, job)
        self._in_a_row = 0
        return result

    async def pin(self, arena: Arena) -> None:
        """Has the device reach host memory directly, if it can."""
        try:
            pinned = await to_its_end(self._threads, partial(self._arena.register, arena.whole()))
            self._log.info("host memory pinned for the device" if pinned else "host memory can't be pinned")
        except DeviceFault as fault:
            self.copy_failed(fault)

    def block_wrong(self, block: Block, what: str) -> None:
        """Counts a block whose bytes were wrong after a copy."""
        self.corrupt += 1
        self._log.warning("a block was wrong after a copy", key=block.key.hex()[:16], outcome=what)

    def copy_failed(self, fault: DeviceFault) -> None:
        """Counts a copy that failed; its blocks stayed where they were."""
        self.failed_copies += 1
        self._in_a_row += 1
        self._log.warning("a copy failed", reason=str(fault))
        if fault.lost or self._in_a_row >= _PATIENCE:
            self._turn_off(str(fault))

    def _turn_off(self, reason: str) -> None:
        self._log.error("the device tier is off", reason=reason)
        keys = list(self.form.table.keys()) if not self.off else []
        self.off = reason
        self.form.hide()
        for key in keys:
            self._tiers.moved(TierKind.GPU, key)

    def close(self) -> None:
        """Frees the arena. When nothing is copied any more."""
        self._alarm.cancel()
        self._threads.shutdown()
        self.form.epochs.close()
        with suppress(DeviceFault):
            self._arena.close()


def _stride(block_bytes: int) -> int:
    return -(-block_bytes // _ALIGN) * _ALIGN
