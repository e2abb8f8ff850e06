"""Copies blocks to the device that will be read there, and saves those that have to leave it.

Only the mover, and leases of a block that is nowhere else, wait for the device. A copy that fails
leaves the block where it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from penstock.kv.device.memory import DeviceFault
from penstock.kvstore.sessions import SessionTable
from penstock.kvstore.table.blocks import Block, BlockUse, TierKind, Written
from penstock.kvstore.tiers.base import Room, Rules
from penstock.kvstore.tiers.device.copier import Move, Outcome
from penstock.kvstore.tiers.device.form import DeviceBlocks, DeviceForm
from penstock.kvstore.tiers.device.movement import Movement
from penstock.kvstore.tiers.host import HostTier
from penstock.kvstore.tiers.tiers import Tiers

_PENDING = 16_384
"""Blocks that were used and wait to be looked at."""


class DeviceMover:
    """Moves blocks between the host tier and the device, while `run` is running."""

    def __init__(
        self, blocks: DeviceBlocks, host: HostTier, sessions: SessionTable, *, tiers: Tiers, rules: Rules
    ) -> None:
        self.promoted = self.demoted = self.supplied = 0
        """Blocks copied up; saved when they had to leave; brought to host memory for a lease."""
        self._blocks = blocks
        self._host = host
        self._sessions = sessions
        self._tiers = tiers
        self._now = rules.now
        self._movement = Movement()
        self._pending: dict[bytes, None] = {}
        self._wake = asyncio.Event()

    @property
    def working(self) -> bool:
        """A copy is under way, or a used block waits to be looked at."""
        return self._blocks.at_work > 0 or bool(self._pending)

    def forget(self) -> None:
        """Everything was formatted."""
        self._pending.clear()

    def used(self, use: BlockUse) -> None:
        """Blocks of host memory were used: some of them may be worth a place on the device."""
        table = self._blocks.form.table
        if self._blocks.off or not table.slots.count:
            return
        for block in use.blocks:
            there = table.touch(block.key, block.session, self._now())
            if not there and len(self._pending) < _PENDING:
                self._pending[block.key] = None
        if self._pending:
            self._wake.set()

    async def run(self) -> None:
        """Moves blocks up, until cancelled."""
        await self._blocks.pin(self._host.arena)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                await self._step()

    # -- moving up

    async def _step(self) -> None:
        """Looks at one batch of used blocks, and moves those up that are worth it."""
        form, found = self._blocks.form, list[Block]()
        if self._blocks.off:
            self._pending.clear()
            return
        while self._pending and len(found) < form.copier.batch:
            key = next(iter(self._pending))
            del self._pending[key]
            if (block := self._host.table.find(key)) is not None:
                found.append(block)
        batch = self._movement.batch(
            found,
            form.copier.batch,
            on_device=form.table.__contains__,
            look=self._sessions.known,
            now=self._now(),
        )
        with self._blocks.working(), self._kept(form, batch):
            await self._make_room(form, len(batch))
            await self._promote(form, batch)

    @contextmanager
    def _kept(self, form: DeviceForm, batch: Sequence[Block]) -> Iterator[None]:
        """What comes before the batch on the device stays there: without it no reader would find the batch."""
        parents = dict.fromkeys(block.parent for block in batch)
        held = [block for parent in parents if (block := form.table.hold(parent)) is not None]
        try:
            yield
        finally:
            for block in held:
                form.table.drop(block, self._now())

    async def _promote(self, form: DeviceForm, batch: Sequence[Block]) -> None:
        table, held, going = self._host.table, list[Block](), list[tuple[Block, Block]]()
        try:
            for block in batch:
                if not form.table.slots.free or table.find(block.key) is not block:
                    break
                table.hold(block.key)
                held.append(block)
                answer = form.table.puts.reserve_own(block.wanted(), self._now())
                if answer.block is None:
                    break
                going.append((answer.block, block))
            await self._send(form, going)
        except DeviceFault as fault:
            self._blocks.copy_failed(fault)
        finally:
            for ours, _ in going:  # what was not committed
                form.table.puts.commit_own(Written(ours.key, ours.epoch, b""), self._now())
            for block in held:
                table.drop(block, self._now())

    async def _send(self, form: DeviceForm, going: list[tuple[Block, Block]]) -> None:
        """Copies the blocks of `going` to the device, and takes out those that arrived."""
        if not going:
            return
        moves = [Move(form.offset(ours), self._host.view(theirs), theirs.checksum) for ours, theirs in going]
        outcomes = await self._blocks.in_thread(partial(form.copier.up, moves))
        for (ours, theirs), outcome in zip(list(going), outcomes, strict=True):
            if outcome is Outcome.GOOD:
                going.remove((ours, theirs))
                ours.inherit(theirs)
                form.table.puts.commit_own(Written(ours.key, ours.epoch, theirs.checksum), self._now())
                self.promoted += 1
                continue
            self._blocks.block_wrong(ours, outcome.name)
            if outcome is Outcome.BAD_SOURCE:
                self._host.table.condemn(theirs.key, theirs.epoch, self._now())

    # -- leaving the device

    async def _make_room(self, form: DeviceForm, count: int) -> None:
        """Frees slots, as far as there are blocks that may go and whose only copies can be saved."""
        while form.table.slots.free < count and not self._blocks.off:
            victims = list[Block]()
            while form.table.slots.free + len(victims) < count and len(victims) < form.copier.batch:
                victim = form.table.victims.hold(self._now())
                if victim is None:
                    break
                victims.append(victim)
            if not await self._leave(form, victims):
                return

    async def _leave(self, form: DeviceForm, victims: list[Block]) -> int:
        """Ends the stay of held blocks; returns how many went."""
        look, now, gone = self._sessions.known, self._now(), 0
        stays = set[bytes]()
        try:
            only = [v for v in victims if not self._elsewhere(v.key) and self._movement.demotes(v, look, now)]
            if only:
                stays = await self._demote(form, only)
        except BaseException:
            stays = {victim.key for victim in victims}
            raise
        finally:
            for victim in victims:
                if victim.key in stays:
                    form.table.victims.spare(victim, self._now())
                else:
                    gone += form.table.victims.discard(victim, self._now())
        return gone

    def _elsewhere(self, key: bytes) -> bool:
        """Whether another tier of this store could bring a block."""
        return any(tier.has_blocks([key]) for tier in self._tiers.kept if tier.kind is not TierKind.GPU)

    async def _demote(self, form: DeviceForm, blocks: Sequence[Block]) -> set[bytes]:
        """Copies blocks to host memory; returns the keys of those that could not be saved though there was room."""
        room = self._host.room()
        try:
            pairs = _reserved(room, blocks)
            saved = await self._fetch(form, room, pairs)
        finally:
            room.close()
        self.demoted += len(saved)
        return set() if self._blocks.off else {block.key for block, _ in pairs if block.key in form.table} - saved

    async def _fetch(self, form: DeviceForm, room: Room, pairs: list[tuple[Block, Block]]) -> set[bytes]:
        """Copies device blocks into reserved host blocks; returns the keys of those that are stored there now."""
        if not pairs:
            return set()
        views = [room.view(theirs) for _, theirs in pairs]
        moves = form.moves(zip((ours for ours, _ in pairs), views, strict=True))
        try:
            outcomes = await self._blocks.in_thread(partial(form.copier.down, moves))
        except DeviceFault as fault:
            self._blocks.copy_failed(fault)
            return set()
        finally:
            for view in views:
                view.release()
        saved = set[bytes]()
        for (ours, theirs), outcome in zip(pairs, outcomes, strict=True):
            if outcome is not Outcome.GOOD:
                self._blocks.block_wrong(ours, outcome.name)
                form.table.condemn(ours.key, ours.epoch, self._now())
                continue
            theirs.inherit(ours)
            room.commit(theirs, ours.checksum)
            saved.add(ours.key)
        return saved

    # -- for leases

    async def bring(self, keys: Sequence[bytes], room: Room, until: float) -> int:
        """Copies the leading ones of `keys` to host memory: see `Supplier.bring_blocks`."""
        done, form = 0, self._blocks.form
        with self._blocks.working():
            while done < len(keys) and not self._blocks.off and self._now() < until:
                part = keys[done : done + form.copier.batch]
                got = await self._bring(form, part, room)
                done += got
                if got < len(part):
                    break
        return done

    async def _bring(self, form: DeviceForm, keys: Sequence[bytes], room: Room) -> int:
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
                form.table.drop(block, self._now())
        self.supplied += len(saved)
        return next((at for at, key in enumerate(keys) if key not in saved), len(keys))


def _reserved(room: Room, blocks: Sequence[Block]) -> list[tuple[Block, Block]]:
    """Device blocks and the host slots for them, up to the first for which there is none."""
    pairs = []
    for block in blocks:
        answer = room.reserve(block.wanted())
        if answer.block is None:
            break
        pairs.append((block, answer.block))
    return pairs
