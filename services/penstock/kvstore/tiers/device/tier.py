"""The device tier of a running store: its table, and the clients that read on the device.

The table is a `BlockTable` of its own over the slots of the device arena, so that epochs, the two phases of a put,
leases, quarantine and the eviction policy are those of the host tier. Only the store itself writes to the device:
workers put into host memory, and the mover copies up what is worth it. A block that is in both tiers may be evicted
from either; one that is only here is brought back for clients that can't read it here.

A device that is lost, or fails again and again, turns the tier off: its blocks are gone, and the store goes on without
it. The tests run the logic on a twin of a device, and tests/gpu/kv runs it on a real one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from penstock.kv.hint import ReturnHint
from penstock.kv.spec import KvSpec
from penstock.kvstore.table.blocks import Block, TierKind
from penstock.kvstore.table.promises import Grant
from penstock.kvstore.table.table import BlockTable
from penstock.kvstore.tiers.base import Dropped, Room, Rules, Supplier, Wish
from penstock.kvstore.tiers.device.form import DeviceBlocks
from penstock.kvstore.tiers.device.mover import DeviceMover
from penstock.kvstore.tiers.dropping import drop_tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStats:
    """Counted by the tier itself. Zeros without a tier."""

    arena_bytes: int = 0
    slots: int = 0
    blocks: int = 0
    used_bytes: int = 0
    """Of blocks and of those on their way."""
    leases: int = 0
    hits: int = 0
    """Blocks leased on the device."""
    promoted: int = 0
    """Copied up."""
    demoted: int = 0
    """The only copies that came down when they had to leave."""
    supplied: int = 0
    """Brought to host memory for a lease."""
    evictions: int = 0
    failed_copies: int = 0
    """Copies that failed; their blocks stayed where they were."""
    corrupt: int = 0
    """Blocks that were wrong after a copy."""
    off: int = 0
    """1: the tier turned itself off."""


class DeviceTier:
    """KeepingTier, Supplier, Follower. Made by `open_device_tier`; used from the store's event loop."""

    kind = TierKind.GPU

    def __init__(self, blocks: DeviceBlocks, mover: DeviceMover, rules: Rules) -> None:
        self.blocks = blocks
        """For the clients that read there."""
        self._mover = mover
        self._now = rules.now
        self._nothing = BlockTable(0, 0, _NoWatcher())

    @property
    def _table(self) -> BlockTable:
        """The table of the blocks that can be found; it is empty when the tier is off."""
        return self._nothing if self.blocks.off else self.blocks.form.table

    @property
    def spec(self) -> KvSpec | None:
        """The spec for which the device's arena is divided; None before the first client."""
        return self.blocks.form.spec

    @property
    def busy(self) -> bool:
        """Whether a client is attached to read on the device, or a copy is under way."""
        return self.blocks.at_work > 0 or self.blocks.form.table.stats().attachments > 0

    @property
    def working(self) -> bool:
        """A copy is under way, or a used block waits to be looked at."""
        return self._mover.working

    def format_for(self, spec: KvSpec) -> None:
        """Divides the device's arena into slots for `spec`, and forgets all blocks and the mover's queue."""
        self.blocks.format_for(spec)
        self._mover.forget()

    def suppliers(self, wish: Wish) -> Sequence[Supplier]:
        """Returns itself."""
        return (self,)

    def has_blocks(self, keys: Sequence[bytes]) -> int:
        """Counts the leading keys that are on the device; 0 when the tier is off."""
        return self._table.lookup(keys)

    async def bring_blocks(self, keys: Sequence[bytes], room: Room, until: float) -> int:
        """Copies leading blocks from the device into `room` and verifies them; returns how many are stored."""
        return await self._mover.bring(keys, room, until)

    def find_block(self, key: bytes) -> Block | None:
        """Finds a block on the device; None: it is not there, or the tier is off."""
        return self._table.find(key)

    def stored_keys(self) -> Iterable[bytes]:
        """Returns a live view of the keys on the device; it is empty when the tier is off."""
        return self._table.keys()

    def promise_blocks(self, keys: Sequence[bytes], seconds: float, namespace: bytes) -> Grant:
        """Promises blocks on the device. Only those here count, because the mover decides which others come."""
        grant, here = self._table.promise(keys, seconds, namespace, self._now()), self._table.lookup(keys)
        return Grant(grant.seconds, min(grant.blocks, here)) if here else Grant()

    def renew_promises(self, keys: Sequence[bytes]) -> None:
        """Renews what the device has promised of these blocks."""
        self._table.renew(keys, self._now())

    def touch_blocks(self, keys: Sequence[bytes], session: str) -> None:
        """Counts as a use of the blocks that are on the device."""
        self._table.touch_all(keys, session, self._now())

    def expect_session(self, session: str, hint: ReturnHint) -> None:
        """Passes the hint to the eviction policy of the device."""
        self._table.expect_session(session, hint)

    async def drop_tenant(self, namespace: bytes) -> Dropped:
        """Has a tenant's blocks leave the device."""
        return await drop_tenant(self._table, self.kind, namespace)

    def figures(self) -> Mapping[str, int]:
        """Returns the fields of GpuStats."""
        return asdict(self.stats())

    def stats(self) -> GpuStats:
        """A consistent snapshot."""
        blocks, mover = self.blocks, self._mover
        table = blocks.form.table.stats()
        return GpuStats(
            arena_bytes=blocks.arena_bytes,
            slots=table.slots,
            blocks=0 if blocks.off else table.blocks,
            used_bytes=table.used_bytes,
            leases=table.leases,
            hits=table.hits,
            promoted=mover.promoted,
            demoted=mover.demoted,
            supplied=mover.supplied,
            evictions=table.evictions,
            failed_copies=blocks.failed_copies,
            corrupt=blocks.corrupt,
            off=int(bool(blocks.off)),
        )


class _NoWatcher:
    def block_stored(self, block: Block) -> None: ...

    def block_removed(self, block: Block) -> None: ...

    def slot_held(self, slot: int, epoch: int) -> None: ...
