"""The blocks of one spec on the disk: the slabs, the table of what they hold, and the way in and out.

The table is a BlockStore like that of the host tier, with slots of the disk instead of slots of memory: the same
two-phase put, pins, tree and eviction. Its epochs are the sequence numbers in the slots' headers. Everything here
runs on the event loop but the calls of `Slabs`, which run in threads.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from penstock.kv.checksum import checksum
from penstock.kvstore.blocks import Block, State, Wanted, Written
from penstock.kvstore.nvme.format import Drop, Header
from penstock.kvstore.nvme.scan import Found
from penstock.kvstore.nvme.slabs import Slabs
from penstock.kvstore.policy import EvictionPolicy
from penstock.kvstore.retention import Retention
from penstock.kvstore.store import BlockStore
from penstock.kvstore.suppliers import Room

_AT_ONCE = 4
"""Runs that are read at the same time, one per thread."""


Result = Header | Drop | None
"""What a slot was; None: it was not read, because the disk failed before."""


@dataclass(slots=True)
class Traffic:
    """What went in and out, over all spaces of a tier."""

    blocks_read: int = 0
    bytes_read: int = 0
    blocks_written: int = 0
    bytes_written: int = 0
    dropped: Counter[Drop] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Move:
    """A block on its way from the disk into a slot of memory."""

    source: Block
    target: Block
    view: memoryview


@dataclass(frozen=True, slots=True)
class _Watcher:
    moved: Callable[[bytes], None]

    def stored(self, block: Block) -> None:
        self.moved(block.key)

    def removed(self, block: Block) -> None:
        self.moved(block.key)

    def holder(self, slot: int, epoch: int) -> None:
        """Nobody maps the disk."""


class Damaged(Exception):
    """Blocks of the host tier whose bytes changed after they were stored."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__(f"{len(blocks)} blocks do not match their checksums")
        self.blocks = blocks


class Space:
    """One spec's blocks. Closed by its owner when nothing is under way."""

    def __init__(
        self,
        slabs: Slabs,
        slots: int,
        found: Found,
        policy: Callable[[], EvictionPolicy],
        retention: Retention,
        moved: Callable[[bytes], None],
        now: Callable[[], float],
        traffic: Traffic,
        *,
        tokens: int,
        grow: Callable[[int], object],
    ) -> None:
        """`moved` hears of every key that comes or goes; `grow` opens a slab that is not there yet, in a thread.

        A block has `tokens` tokens.
        """
        self.slabs = slabs
        self._tokens = tokens
        self._grow = grow
        self._now = now
        self._traffic = traffic
        sequences = itertools.count(found.sequence + 1)
        self.table = BlockStore(
            *(slots, slabs.shape.slot_bytes, _Watcher(moved)),
            policy=policy,
            epochs=sequences,
            cooling_s=0.0,
            retention=retention,
        )
        self._restore(found.blocks)
        self._readers = ThreadPoolExecutor(_AT_ONCE, "penstock-nvme-read")
        self._writer = ThreadPoolExecutor(1, "penstock-nvme-write")

    def _restore(self, blocks: Sequence[Block]) -> None:
        """What was stored before a restart; what was promised of it, for the seconds that are left."""
        wall, promises = time.time(), []
        for block in blocks:
            if block.retained_until > wall and block.namespace:
                promises.append((block, block.retained_until - wall))
            block.retained_until = 0.0
        self.table.restore(blocks, self._now())
        for block, left in promises:
            self.table.promise([block.key], left, block.namespace, self._now())

    # -- out

    async def bring(self, keys: Sequence[bytes], room: Room, until: float) -> int:
        """See Supplier. What can't be read is counted in the traffic."""
        flying: deque[tuple[Future[list[Result]], list[_Move]]] = deque()
        at = done = 0
        try:
            while True:
                while at < len(keys) and len(flying) < _AT_ONCE and self._now() < until:
                    moves, passed, more = self._take(keys[at : at + self.slabs.shape.run_slots], room)
                    at = at + passed if more else len(keys)
                    done += passed - len(moves)
                    if moves:
                        flying.append((self._readers.submit(self._read, moves), moves))
                if not flying:
                    return done
                results = await asyncio.shield(asyncio.wrap_future(flying[0][0]))
                landed = self._land(results, flying.popleft()[1], room)
                done += landed
                if landed < len(results):
                    return done
        finally:
            await self._end(flying, room)

    def _take(self, keys: Sequence[bytes], room: Room) -> tuple[list[_Move], int, bool]:
        """Moves for the leading keys, how many keys that is with those that need none, and whether to go on."""
        moves: list[_Move] = []
        for passed, key in enumerate(keys):
            source = self.table.hold(key)
            if source is None:
                return moves, passed, False
            answer = room.reserve(
                Wanted(key, source.parent, source.first_token, source.seconds, namespace=source.namespace)
            )
            if answer.block is not None:
                answer.block.uses, answer.block.turn = source.uses, source.turn
                moves.append(_Move(source, answer.block, room.view(answer.block)))
                continue
            self.table.drop(source, self._now())
            if answer.state is State.FULL:
                return moves, passed, False
        return moves, len(keys), True

    def _read(self, moves: Sequence[_Move]) -> list[Result]:
        slots = [move.source.slot for move in moves]
        found: list[Result] = []
        for run in self.slabs.shape.runs(slots):
            try:
                found += self.slabs.read([slots[index] for index in run], [moves[index].view for index in run])
            except OSError:
                found += self._read_singly([moves[index] for index in run])
            if Drop.UNREADABLE in found:
                break
        return found + [None] * (len(moves) - len(found))

    def _read_singly(self, moves: Sequence[_Move]) -> list[Result]:
        """Finds out which block it is that the disk can't read; ends with it."""
        found: list[Result] = []
        for move in moves:
            try:
                found += self.slabs.read([move.source.slot], [move.view])
            except OSError:
                return [*found, Drop.UNREADABLE]
        return found

    def _land(self, results: Sequence[Result], moves: Sequence[_Move], room: Room) -> int:
        """Makes the leading good blocks findable; gives the others back. Returns how many were good."""
        good = 0
        for index, (result, move) in enumerate(zip(results, moves, strict=True)):
            move.view.release()
            if isinstance(result, Drop) or (result is not None and result.key != move.source.key):
                room.give_back(move.target)
                self._condemn(move.source, result if isinstance(result, Drop) else Drop.CORRUPT)
                continue
            if result is not None and good == index:
                room.commit(move.target, result.checksum)
                good += 1
            else:  # not read, or whole but behind one that is not
                room.give_back(move.target)
            self.table.drop(move.source, self._now())
        self._traffic.blocks_read += good
        self._traffic.bytes_read += good * self.slabs.shape.slot_bytes
        return good

    def _condemn(self, block: Block, reason: Drop) -> None:
        """Never serves a held block again, also not after a restart; its slot is free when it is empty."""
        if not self.table.condemn(block.key, block.epoch, self._now()):
            self.table.drop(block, self._now())
            return
        self._traffic.dropped[reason] += 1
        erasing = asyncio.wrap_future(self._writer.submit(self._erase, block.slot))
        erasing.add_done_callback(lambda _: self.table.drop(block, self._now()))

    def _erase(self, slot: int) -> None:
        with suppress(OSError):
            self.slabs.erase(slot)

    async def _end(self, flying: deque[tuple[Future[list[Result]], list[_Move]]], room: Room) -> None:
        """Waits until no thread writes into memory any more, whatever happens, and gives everything back."""
        interrupted = [await _finished(future) for future, _ in flying]
        for _, moves in flying:
            for move in moves:
                move.view.release()
                room.give_back(move.target)
                self.table.drop(move.source, self._now())
        if any(interrupted):
            raise asyncio.CancelledError

    # -- in

    def room(self, block: Block) -> Block | None:
        """A slot of the disk for a block of the host tier; None: it is there already, or nothing may go for it."""
        wanted = Wanted(
            *(block.key, block.parent, block.first_token, block.seconds, block.conversation, block.namespace)
        )
        slot = self.table.reserve_own(wanted, self._now()).block
        if slot is not None:
            slot.uses, slot.turn = block.uses, block.turn
            slot.retained_until = self.table.promised_until(block.key)
        return slot

    async def write(self, pairs: Sequence[tuple[Block, Block, memoryview]]) -> None:
        """Writes blocks of the host tier (first) into slots from `room` (second), and makes them findable there.

        When it fails, or is cancelled, what is not written is given back. Raises OSError, Damaged.
        """
        pairs = sorted(pairs, key=lambda pair: pair[1].slot)
        slots = [slot.slot for _, slot, _ in pairs]
        left = list(pairs)
        try:
            for run in self.slabs.shape.runs(slots):
                part = [pairs[index] for index in run]
                writing = self._writer.submit(self._write, part)
                interrupted = await _finished(writing)
                if not writing.cancelled() and writing.exception() is None:
                    self._commit(part)
                    left = left[len(part) :]
                if interrupted:
                    raise asyncio.CancelledError
                writing.result()
        finally:
            for _, slot, _ in left:
                self.table.commit_own(Written(slot.key, slot.epoch, b""), self._now())

    def _write(self, part: Sequence[tuple[Block, Block, memoryview]]) -> None:
        bad = [block for block, _, view in part if checksum(view) != block.checksum]
        if bad:
            raise Damaged(bad)
        if not self.slabs.is_open(part[0][1].slot):
            self._grow(part[0][1].slot // self.slabs.shape.slab_slots)
        headers = [
            Header(
                key=block.key,
                parent=block.parent,
                checksum=block.checksum,
                namespace=block.namespace,
                first_token=block.first_token,
                tokens=self._tokens,
                length=self.slabs.shape.block_bytes,
                sequence=slot.epoch,
                seconds=block.seconds,
                uses=block.uses,
                retained_until=_wall(slot.retained_until, self._now()),
            )
            for block, slot, _ in part
        ]
        self.slabs.write([slot.slot for _, slot, _ in part], headers, [view for _, _, view in part])

    def _commit(self, part: Sequence[tuple[Block, Block, memoryview]]) -> None:
        for block, slot, _ in part:
            self.table.commit_own(Written(slot.key, slot.epoch, block.checksum), self._now())
        self._traffic.blocks_written += len(part)
        self._traffic.bytes_written += len(part) * self.slabs.shape.slot_bytes

    async def in_writer(self, job: Callable[[], object]) -> None:
        """Runs a job of the files behind all writes. Raises what it raises."""
        await asyncio.wrap_future(self._writer.submit(job))

    async def close(self) -> None:
        """Waits for the threads, and closes the files."""
        for pool in (self._readers, self._writer):
            await asyncio.to_thread(pool.shutdown)
        self.slabs.close()


def _wall(until: float, now: float) -> float:
    """A time of the table's clock in seconds since 1970; 0, and what is past, is 0."""
    return time.time() + until - now if until > now else 0.0


async def _finished(future: Future[Any]) -> bool:
    """Returns when a job of a thread is over, or will never begin; whether somebody cancelled the caller meanwhile."""
    interrupted, over = False, asyncio.Event()
    loop = asyncio.get_running_loop()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(over.set))
    while not future.done():
        try:
            await over.wait()
        except asyncio.CancelledError:
            interrupted = True
            future.cancel()
    return interrupted
