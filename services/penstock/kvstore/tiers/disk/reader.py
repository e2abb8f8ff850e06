"""The way from the disk into memory: some runs ahead, each read in a thread, verified, and made findable in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from penstock.kvstore.table.blocks import Block, ReserveState, Wanted
from penstock.kvstore.table.table import BlockTable
from penstock.kvstore.tiers.base import Room
from penstock.kvstore.tiers.disk.format import Drop, Header
from penstock.kvstore.tiers.disk.slabs import Slabs
from penstock.kvstore.tiers.disk.stats import Traffic
from penstock.runtime.threads import started_threads, to_its_end

_AT_ONCE = 4
"""Runs that are read at the same time, one per thread."""


Result = Header | Drop | None
"""What a slot was; None: it was not read, because the disk failed before."""


@dataclass(frozen=True, slots=True)
class _Move:
    """A block on its way from the disk into a slot of memory."""

    source: Block
    target: Block
    view: memoryview


_Flying = deque[tuple[asyncio.Task[list[Result]], list[_Move]]]
"""Runs that are being read, in order."""


class DiskReader:
    """Reads blocks of one table and its slabs. Its owner closes it when no read is under way."""

    def __init__(
        self, table: BlockTable, slabs: Slabs, writer: ThreadPoolExecutor, now: Callable[[], float], traffic: Traffic
    ) -> None:
        """`writer` erases the slots of damaged blocks, after its other jobs."""
        self._table = table
        self._slabs = slabs
        self._writer = writer
        self._now = now
        self._traffic = traffic
        self._threads = started_threads(_AT_ONCE, "penstock-nvme-read")

    async def bring(self, keys: Sequence[bytes], room: Room, until: float) -> int:
        """Reads up to four runs of blocks at once into `room`, and commits them in order; returns how many are stored.

        The traffic counts blocks that can't be read. Also when cancelled, it returns only when no thread writes into
        a slot any more, and gives back the slots that it did not commit.
        """
        flying: _Flying = deque()
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    return await self._bring(keys, room, until, tasks=tasks, flying=flying)
                finally:
                    for reading, _ in flying:
                        reading.cancel()  # the group waits until no thread writes into memory any more
        finally:
            self._give_back(flying, room)

    async def _bring(
        self, keys: Sequence[bytes], room: Room, until: float, *, tasks: asyncio.TaskGroup, flying: _Flying
    ) -> int:
        at = done = 0
        while True:
            while at < len(keys) and len(flying) < _AT_ONCE and self._now() < until:
                moves, passed, more = self._take(keys[at : at + self._slabs.shape.run_slots], room)
                at = at + passed if more else len(keys)
                done += passed - len(moves)
                if moves:
                    flying.append((tasks.create_task(to_its_end(self._threads, partial(self._read, moves))), moves))
            if not flying:
                return done
            results = await asyncio.shield(flying[0][0])
            landed = self._land(results, flying.popleft()[1], room)
            done += landed
            if landed < len(results):
                return done

    def _take(self, keys: Sequence[bytes], room: Room) -> tuple[list[_Move], int, bool]:
        """Moves for the leading keys, how many keys that is with those that need none, and whether to go on."""
        moves: list[_Move] = []
        for passed, key in enumerate(keys):
            source = self._table.hold(key)
            if source is None:
                return moves, passed, False
            answer = room.reserve(
                Wanted(key, source.parent, source.first_token, source.seconds, namespace=source.namespace)
            )
            if answer.block is not None:
                answer.block.uses, answer.block.turn = source.uses, source.turn
                moves.append(_Move(source, answer.block, room.view(answer.block)))
                continue
            self._table.drop(source, self._now())
            if answer.state is ReserveState.FULL:
                return moves, passed, False
        return moves, len(keys), True

    def _read(self, moves: Sequence[_Move]) -> list[Result]:
        slots = [move.source.slot for move in moves]
        found: list[Result] = []
        for run in self._slabs.shape.runs(slots):
            try:
                found += self._slabs.read([slots[index] for index in run], [moves[index].view for index in run])
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
                found += self._slabs.read([move.source.slot], [move.view])
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
            self._table.drop(move.source, self._now())
        self._traffic.blocks_read += good
        self._traffic.bytes_read += good * self._slabs.shape.slot_bytes
        return good

    def _condemn(self, block: Block, reason: Drop) -> None:
        """Never serves a held block again, also not after a restart; its slot is free when it is empty."""
        if not self._table.condemn(block.key, block.epoch, self._now()):
            self._table.drop(block, self._now())
            return
        self._traffic.dropped[reason] += 1
        erasing = asyncio.wrap_future(self._writer.submit(self._erase, block.slot))
        erasing.add_done_callback(lambda _: self._table.drop(block, self._now()))

    def _erase(self, slot: int) -> None:
        with suppress(OSError):
            self._slabs.erase(slot)

    def _give_back(self, flying: _Flying, room: Room) -> None:
        """Gives back the slots of blocks that did not land."""
        for _, moves in flying:
            for move in moves:
                move.view.release()
                room.give_back(move.target)
                self._table.drop(move.source, self._now())

    async def close(self) -> None:
        """Waits for the threads."""
        await asyncio.to_thread(self._threads.shutdown)
