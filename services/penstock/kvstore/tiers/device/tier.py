"""The device tier of a running store: its table, who goes up and comes down, and the clients that read on the device.

The table is a `BlockTable` of its own over the slots of the device arena, so that epochs, the two phases of a put,
leases, quarantine and the eviction policy are those of the host tier. Only the store itself writes to the device:
workers put into host memory, and the mover copies up what is worth it. A block that is in both tiers may be evicted
from either; one that is only here is brought back for whoever can't read it here.

Nothing waits for the device but the mover and those who asked for a block that is nowhere else. A copy that fails
leaves the block where it was. A device that is lost, or fails again and again, turns the tier off: its blocks are
gone, and the store goes on without it.

The logic has run on a twin of a device only; see tests/gpu for what is to be run on a real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import structlog

from penstock.kv.device.epochs import EpochTable
from penstock.kv.device.memory import DeviceArena, DeviceFault
from penstock.kv.spec import KvSpec
from penstock.kvstore.keeper import Keeper
from penstock.kvstore.table.blocks import Block, Lease, TierKind, Wanted, Written
from penstock.kvstore.table.table import BlockTable
from penstock.kvstore.tiers.base import Room
from penstock.kvstore.tiers.device.copier import Copier, Move, Outcome
from penstock.kvstore.tiers.device.movement import Movement

_ALIGN = 512
"""Of slots, so that a view of any type can begin at one."""
_BATCH_BYTES = 16 << 20
"""Copied together: large enough for full speed, small enough that nobody waits long behind it."""
_PENDING = 16_384
"""Blocks that were used and wait to be looked at."""
_PATIENCE = 8
"""Failed copies in a row that turn the tier off."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class GpuStats:
    """Counted by the tier itself."""

    arena_bytes: int
    slots: int
    blocks: int
    used_bytes: int
    """Of blocks and of those on their way."""
    leases: int
    hits: int
    """Blocks leased on the device."""
    promoted: int
    """Copied up."""
    demoted: int
    """The only copies that came down when they had to leave."""
    supplied: int
    """Brought to host memory for a lease."""
    evictions: int
    failed_copies: int
    """Copies that failed; their blocks stayed where they were."""
    corrupt: int
    """Blocks that were wrong after a copy."""
    off: int
    """1: the tier turned itself off."""


NO_GPU = GpuStats(*[0] * 13)


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """What a client needs to read on the device."""

    uuid: str
    handle: bytes
    arena_bytes: int
    stride: int
    slots: int
    epochs_path: str
    epochs_id: bytes


@dataclass(eq=False)
class _Format:
    """The arena as it is cut up for one KvSpec."""

    table: BlockTable
    epochs: EpochTable
    copier: Copier
    stride: int

    def moves(self, pairs: Iterable[tuple[Block, memoryview]]) -> list[Move]:
        """Device blocks, and their host memory."""
        return [Move(block.slot * self.stride, view, block.checksum) for block, view in pairs]


@dataclass(frozen=True)
class _Watch:
    """Tells subscribers and clients what happens to the device's table."""

    keeper: Keeper
    epochs: EpochTable

    def block_stored(self, block: Block) -> None:
        self.keeper.placed(block.key)

    def block_removed(self, block: Block) -> None:
        self.keeper.placed(block.key)

    def slot_held(self, slot: int, epoch: int) -> None:
        self.epochs.set(slot, epoch)


class GpuTier:
    """A tier over `arena`, which it closes. All calls on the store's event loop; `run` beside them, `close` at last."""

    tier = TierKind.GPU

    def __init__(self, keeper: Keeper, arena: DeviceArena, uuid: str, movement: Movement | None = None) -> None:
        self.off = ""
        """Why the tier turned itself off; empty: it works."""
        self._keeper = keeper
        self._arena = arena
        self._uuid = uuid
        self._movement = movement or Movement()
        self._format: _Format | None = None
        self._pending: dict[bytes, None] = {}
        self._wake = asyncio.Event()
        self._threads = ThreadPoolExecutor(3, "penstock-gpu")  # one to pin, one up, one down
        self._at_work = 0
        self._in_a_row = 0
        self._promoted = self._demoted = self._supplied = self._failed = self._corrupt = 0
        self._log = structlog.get_logger("penstock.kvstore")

    # -- the life of it

    def format(self, spec: KvSpec) -> None:
        """Empties the tier, and cuts the arena up for the blocks of `spec`. Not while it is `busy`."""
        assert not self.busy
        self._unformat()
        stride = -(-spec.block_bytes // _ALIGN) * _ALIGN
        slots = self._arena.size // stride
        if slots == 0 or self.off:
            return
        epochs = EpochTable(slots)
        table = BlockTable(
            slots,
            spec.block_bytes,
            _Watch(self._keeper, epochs),
            policy=self._keeper.policy,
            epochs=self._keeper.epochs,
        )
        batch = max(1, min(slots, _BATCH_BYTES // spec.block_bytes))
        self._format = _Format(table, epochs, Copier(self._arena, spec.block_bytes, batch), stride)
        self._log.info("device memory formatted", slots=slots, device=self._uuid)

    def _unformat(self) -> None:
        if self._format is not None:
            self._format.epochs.close()
            self._format = None
        self._pending.clear()

    @property
    def busy(self) -> bool:
        """Somebody reads, or a copy is under way."""
        return self._at_work > 0 or (self._format is not None and self._format.table.stats().attachments > 0)

    @property
    def working(self) -> bool:
        """A copy is under way, or a used block waits to be looked at."""
        return self._at_work > 0 or bool(self._pending)

    async def run(self) -> None:
        """Pins the store's host memory, then moves blocks up, until cancelled."""
        try:
            pinned = await self._in_thread(self._arena.register, self._keeper.arena.whole())
            self._log.info("host memory pinned for the device" if pinned else "host memory can't be pinned")
        except DeviceFault as fault:
            self._failure(fault)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while await self._step():
                pass

    def close(self) -> None:
        """Frees the arena. When `run` has ended and nobody brings anything any more."""
        self._threads.shutdown()
        self._unformat()
        with suppress(DeviceFault):
            self._arena.close()

    # -- what clients do

    def place(self) -> DevicePlace | None:
        """Where clients of the same device find the blocks; None: there is nothing to find."""
        form = self._format
        if form is None or self.off:
            return None
        handle, size, slots = self._arena.handle, self._arena.size, form.table.stats().slots
        return DevicePlace(self._uuid, handle, size, form.stride, slots, form.epochs.path, form.epochs.table_id)

    def attach(self, attachment_id: str, client: str) -> None:
        """The attachment reads on the device."""
        if self._format is not None:
            self._format.table.attach(attachment_id, client)

    def detach(self, attachment_id: str) -> None:
        """Takes back all that the attachment has leased here."""
        if self._format is not None and self._format.table.attached(attachment_id):
            self._format.table.detach(attachment_id, self._keeper.now())

    def lease(self, attachment_id: str, keys: Sequence[bytes], seconds: float, session: str) -> Lease | None:
        """Pins the leading blocks that are on the device, for an attachment that reads there."""
        form = self._format
        if form is None or self.off or not form.table.attached(attachment_id):
            return None
        return form.table.leases.take(attachment_id, keys, seconds, self._keeper.now(), session)

    def abandon(self, lease: Lease) -> None:
        """Gives a lease back that nobody will hear of."""
        if self._format is not None:
            self._format.table.leases.abandon(lease, self._keeper.now())

    def release(self, attachment_id: str, lease_ids: Sequence[int]) -> list[bool]:
        """Gives leases back. False: it had expired."""
        if self._format is None or not self._format.table.attached(attachment_id):
            return [False] * len(lease_ids)
        return self._format.table.leases.release(attachment_id, lease_ids, self._keeper.now())

    def quarantine(self, attachment_id: str, key: bytes, epoch: int) -> bool:
        """Takes a block out of service that a client found wrong on the device."""
        if self._format is None or not self._format.table.attached(attachment_id):
            return False
        return self._format.table.quarantine(attachment_id, key, epoch, self._keeper.now())

    def offset(self, block: Block) -> int:
        """Where a block of a lease begins."""
        assert self._format is not None
        return block.slot * self._format.stride

    def used(self, blocks: Iterable[Block]) -> None:
        """Blocks of host memory were leased: some of them may be worth a place here."""
        if self._format is None or self.off:
            return
        for block in blocks:
            there = self._format.table.touch(block.key, block.session, self._keeper.now())
            if not there and len(self._pending) < _PENDING:
                self._pending[block.key] = None
        if self._pending:
            self._wake.set()

    # -- moving up

    async def _step(self) -> bool:
        """Moves one batch up; whether there may be more."""
        form = self._format
        if form is None or self.off or not self._pending:
            return False
        store, now = self._keeper.store, self._keeper.now()
        candidates = list[Block]()
        while self._pending and len(candidates) < form.copier.batch:
            key = next(iter(self._pending))
            del self._pending[key]
            if (block := store.find(key)) is not None:
                candidates.append(block)
        look = self._keeper.sessions.outlook
        batch = self._movement.batch(candidates, form.copier.batch, form.table.__contains__, look, now)
        with self._working():
            await self._make_room(form, len(batch))
            await self._promote(form, batch)
        return True

    async def _promote(self, form: _Format, batch: Sequence[Block]) -> None:
        store, held, going = self._keeper.store, list[Block](), list[tuple[Block, Block]]()
        try:
            for block in batch:
                if not form.table.slots.free or store.find(block.key) is not block:
                    break
                store.hold(block.key)
                held.append(block)
                answer = form.table.puts.reserve_own(_wanted(block), self._keeper.now())
                assert answer.block is not None
                going.append((answer.block, block))
            await self._send(form, going)
        except DeviceFault as fault:
            self._failure(fault)
        finally:
            for ours, _ in going:  # what was not committed
                form.table.puts.commit_own(Written(ours.key, ours.epoch, b""), self._keeper.now())
            for block in held:
                store.drop(block, self._keeper.now())

    async def _send(self, form: _Format, going: list[tuple[Block, Block]]) -> None:
        """Takes out of `going` what has arrived."""
        if not going:
            return
        moves = [Move(ours.slot * form.stride, self._host(theirs), theirs.checksum) for ours, theirs in going]
        outcomes = await self._in_thread(form.copier.up, moves)
        self._in_a_row = 0
        for (ours, theirs), outcome in zip(list(going), outcomes, strict=True):
            if outcome is Outcome.GOOD:
                going.remove((ours, theirs))
                _inherit(ours, theirs)
                form.table.puts.commit_own(Written(ours.key, ours.epoch, theirs.checksum), self._keeper.now())
                self._promoted += 1
                continue
            self._corrupt += 1
            self._log.warning("a block was wrong after its copy", key=ours.key.hex()[:16], outcome=outcome.name)
            if outcome is Outcome.BAD_SOURCE:
                self._keeper.store.condemn(theirs.key, theirs.epoch, self._keeper.now())

    # -- moving down

    async def _make_room(self, form: _Format, count: int) -> None:
        """Frees slots, as far as there are blocks that may go and whose only copies can be saved."""
        while form.table.slots.free < count and not self.off:
            victims = list[Block]()
            while form.table.slots.free + len(victims) < count and len(victims) < form.copier.batch:
                victim = form.table.victims.hold(self._keeper.now())
                if victim is None:
                    break
                victims.append(victim)
            if not await self._leave(form, victims):
                return

    async def _leave(self, form: _Format, victims: list[Block]) -> int:
        """Ends the stay of held blocks; returns how many went."""
        look, now = self._keeper.sessions.outlook, self._keeper.now()
        stays = set[bytes]()
        try:
            only = [v for v in victims if not self._elsewhere(v.key) and self._movement.demotes(v, look, now)]
            if only:
                stays = await self._demote(form, only)
        except BaseException:
            stays = {victim.key for victim in victims}
            raise
        finally:
            gone = 0
            for victim in victims:
                if victim.key in stays:
                    form.table.victims.spare(victim, self._keeper.now())
                else:
                    gone += form.table.victims.discard(victim, self._keeper.now())
        return gone

    def _elsewhere(self, key: bytes) -> bool:
        """Whether another tier of this store has a block."""
        others = (one for one in self._keeper.suppliers if one is not self and one.tier is not TierKind.REMOTE)
        return key in self._keeper.store or any(one.has([key]) for one in others)

    async def _demote(self, form: _Format, blocks: Sequence[Block]) -> set[bytes]:
        """Copies blocks to host memory; returns the keys of those that could not be saved though there was room."""
        room = Room(self._keeper.store, self._keeper.arena, self._keeper.now, lambda: None)
        try:
            pairs = _reserved(room, blocks)
            saved = await self._fetch(form, room, pairs)
        finally:
            room.close()
        self._demoted += len(saved)
        return set() if self.off else {block.key for block, _ in pairs if block.key in form.table} - saved

    async def _fetch(self, form: _Format, room: Room, pairs: list[tuple[Block, Block]]) -> set[bytes]:
        """Copies device blocks into reserved host blocks; returns the keys of those that are stored there now."""
        if not pairs:
            return set()
        views = [room.view(theirs) for _, theirs in pairs]
        moves = form.moves(zip((ours for ours, _ in pairs), views, strict=True))
        try:
            outcomes = await self._in_thread(form.copier.down, moves)
        except DeviceFault as fault:
            self._failure(fault)
            return set()
        finally:
            for view in views:
                view.release()
        self._in_a_row, saved = 0, set[bytes]()
        for (ours, theirs), outcome in zip(pairs, outcomes, strict=True):
            if outcome is not Outcome.GOOD:
                self._corrupt += 1
                self._log.warning("a block on the device was wrong", key=ours.key.hex()[:16])
                form.table.condemn(ours.key, ours.epoch, self._keeper.now())
                continue
            _inherit(theirs, ours)
            room.commit(theirs, ours.checksum)
            saved.add(ours.key)
        return saved

    # -- as a supplier

    def has(self, keys: Sequence[bytes]) -> int:
        """See Supplier."""
        return self._format.table.lookup(keys) if self._format is not None and not self.off else 0

    def all_keys(self) -> Iterable[bytes]:
        """See Supplier."""
        return self._format.table.keys() if self._format is not None and not self.off else ()

    def find(self, key: bytes) -> Block | None:
        """See Supplier."""
        return self._format.table.find(key) if self._format is not None and not self.off else None

    async def bring(self, keys: Sequence[bytes], room: Room, until: float) -> int:
        """See Supplier."""
        done = 0
        with self._working():
            while self._format is not None and done < len(keys) and not self.off and self._keeper.now() < until:
                part = keys[done : done + self._format.copier.batch]
                got = await self._bring(self._format, part, room)
                done += got
                if got < len(part):
                    break
        return done

    async def _bring(self, form: _Format, keys: Sequence[bytes], room: Room) -> int:
        held = list[Block]()
        try:
            for key in keys:
                block = form.table.hold(key)
                if block is None:
                    break
                held.append(block)
            saved = await self._fetch(form, room, _reserved(room, held))
        finally:
            for block in held:
                form.table.drop(block, self._keeper.now())
        self._supplied += len(saved)
        return next((at for at, key in enumerate(keys) if key not in saved), len(keys))

    # -- copies and faults

    def _host(self, block: Block) -> memoryview:
        return self._keeper.arena.block(block.slot, self._keeper.store.block_bytes)

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1

    async def _in_thread(self, job: Callable[..., Result], *arguments: object) -> Result:
        """Also when cancelled, it returns only when the job has ended: until then bytes move."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, job, *arguments)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            with suppress(DeviceFault):
                running.result()
            raise

    def _failure(self, fault: DeviceFault) -> None:
        self._failed += 1
        self._in_a_row += 1
        self._log.warning("a copy failed", reason=str(fault))
        if fault.lost or self._in_a_row >= _PATIENCE:
            self._turn_off(str(fault))

    def _turn_off(self, reason: str) -> None:
        self._log.error("the device tier is off", reason=reason)
        keys = list(self.all_keys())
        self.off = reason
        self._pending.clear()
        if self._format is not None:
            for slot in range(self._format.table.stats().slots):
                self._format.epochs.set(slot, 0)
        for key in keys:
            self._keeper.placed(key)

    def stats(self) -> GpuStats:
        """A consistent snapshot."""
        form = self._format
        if form is not None:
            form.table.expire(self._keeper.now())
        table = form.table.stats() if form is not None else None
        return GpuStats(
            arena_bytes=self._arena.size,
            slots=table.slots if table else 0,
            blocks=table.blocks if table and not self.off else 0,
            used_bytes=table.used_bytes if table else 0,
            leases=table.leases if table else 0,
            hits=table.hits if table else 0,
            promoted=self._promoted,
            demoted=self._demoted,
            supplied=self._supplied,
            evictions=table.evictions if table else 0,
            failed_copies=self._failed,
            corrupt=self._corrupt,
            off=int(bool(self.off)),
        )


def _wanted(block: Block) -> Wanted:
    return Wanted(block.key, block.parent, block.first_token, block.seconds, block.session, block.namespace)


def _inherit(copy: Block, block: Block) -> None:
    """A copy is worth what its block is."""
    copy.uses, copy.used_at, copy.turn = block.uses, block.used_at, block.turn
    copy.retained_until = block.retained_until


def _reserved(room: Room, blocks: Sequence[Block]) -> list[tuple[Block, Block]]:
    """Device blocks and the host slots for them, up to the first for which there is none."""
    pairs = []
    for block in blocks:
        answer = room.reserve(_wanted(block))
        if answer.block is None:
            break
        pairs.append((block, answer.block))
    return pairs
