"""Carries out what `movement` chooses: copies blocks to the disk without delaying writers, and brings blocks into
memory before their session comes back.

One small piece at a time, with as long a pause after it as it took, and none while a lease waits for the disk; a
block is pinned while it is copied. Cancelling it at any point gives everything back.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from penstock.kvstore.sessions import AwaitedSessions, SessionTable
from penstock.kvstore.table.blocks import Block, BlockUse
from penstock.kvstore.tiers.disk.blocks import DiskBlocks
from penstock.kvstore.tiers.disk.movement import Candidates, Learned, Merit, worth
from penstock.kvstore.tiers.disk.space import Damaged
from penstock.kvstore.tiers.host import HostTier

_AHEAD_S = 2.0
"""How long before a session is expected its blocks are brought."""
_BRING_S = 10.0
_BEHIND_S = 0.5
"""How long a piece stands back behind leases that wait."""
_LONGEST_WAIT_S = 5.0
_NO_PLACE_S = 1.0
_PART = 16
_GLANCE = 512
"""Blocks that are looked at in one step."""
_MOST_USES = 256
"""Uses that the disk was not told of yet; of more the oldest are forgotten."""


class DiskMover:
    """Watches the host tier and moves blocks between it and the disk: `look`, `run` it, then `flush` at the end."""

    def __init__(
        self,
        disk: DiskBlocks,
        host: HostTier,
        sessions: SessionTable,
        awaited: AwaitedSessions,
        *,
        now: Callable[[], float],
        learned: Learned,
    ) -> None:
        """`awaited` are the expected ones of `sessions`; `learned` is what the mover before it has learned, and learns
        on."""
        self._disk = disk
        self._host = host
        self._sessions = sessions
        self._awaited = awaited
        self._now = now
        self._reuse = learned.reuse
        self._ends = learned.ends
        self._candidates = Candidates(self._judge)
        self._used: deque[tuple[str, list[bytes]]] = deque(maxlen=_MOST_USES)
        self._wake = asyncio.Event()
        self._log = structlog.get_logger("penstock.kvstore.mover")

    @property
    def pending(self) -> int:
        """Blocks that are to be written."""
        return len(self._candidates)

    @property
    def waiting(self) -> int:
        """Blocks that have not earned the disk yet."""
        return self._candidates.waiting

    # -- what it is told

    async def look(self) -> None:
        """Learns of the blocks that came into host memory before the disk was open, some at a time."""
        keys = list(self._host.stored_keys())
        for start in range(0, len(keys), _GLANCE):
            for block in map(self._host.find_block, keys[start : start + _GLANCE]):
                if block is not None:
                    self.block_stored(block)
            await asyncio.sleep(0)

    def wake(self) -> None:
        """Something new is known of a session."""
        self._wake.set()

    def block_stored(self, block: Block) -> None:
        """A block came into the host tier."""
        self._ends.at(block.session, block.key)
        if not self._disk.holds(block.key):
            self._candidates.add(block)
            self._wake.set()

    def block_removed(self, block: Block) -> None:
        """A block left the host tier."""
        self._candidates.discard(block.key)
        if not self._disk.holds(block.key):
            self._reuse.learn(block.uses > 0)
            self._ends.gone(block)

    def used(self, use: BlockUse) -> None:
        """Blocks of host memory were used."""
        if use.blocks:
            self._ends.at(use.session, use.blocks[-1].key)
        self._used.append((use.session, [block.key for block in use.blocks]))
        for _ in range(use.brought):
            self._reuse.learn(True)
        if self._candidates.waiting:
            for block in use.blocks:
                self._candidates.again(block)
        self._wake.set()

    def promised(self, keys: Sequence[bytes]) -> None:
        """A tenant was promised these blocks: those in memory go to the disk first."""
        for block in map(self._host.find_block, keys):
            if block is not None:
                self._candidates.again(block)
        self._wake.set()

    def _judge(self, block: Block) -> Merit:
        known = self._sessions.known(block.session) if block.session else None
        if self._disk.table.promised_until(block.key) > self._now():
            return Merit.PROMISED
        return worth(block, known, self._reuse.share, self._now())

    # -- what it does

    async def run(self) -> None:
        """Moves blocks until cancelled."""
        while True:
            await self._wait()
            await self._tell_uses()
            for session in self._awaited.due(self._now(), _AHEAD_S):
                await self._prefetch(self._ends.chain(session, self._find))
            if self._candidates:
                await self._write_some()

    async def _wait(self) -> None:
        """Returns when there may be something to do."""
        pause = self._awaited.next_due() - _AHEAD_S - self._now()
        if self._candidates:
            pause = min(pause, self._disk.writes_wait_s(self._disk.run_blocks))
        if pause <= 0 or self._used:
            return
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if pause == math.inf else min(pause, _LONGEST_WAIT_S)):
                await self._wake.wait()

    async def _tell_uses(self) -> None:
        """Reports uses in memory to the disk's table, so that used blocks stay there too. No lease waits for it."""
        while self._used:
            session, keys = self._used.popleft()
            self._disk.touch(keys, session)
            await asyncio.sleep(0)

    async def _write_some(self) -> None:
        """Lets bringings go first for a bounded time, writes one piece, then pauses for as long as that took."""
        with suppress(TimeoutError):  # there may always be one
            async with asyncio.timeout(_BEHIND_S):
                await self._host.bringer.idle()
        if self._disk.writes_wait_s(self._disk.run_blocks) > 0:
            return
        begin = self._now()
        written = await self._write(self._candidates.take(self._piece()))
        await asyncio.sleep(self._now() - begin if written else _NO_PLACE_S)

    def _piece(self) -> int:
        """Blocks to copy at once: they are pinned meanwhile, and a small memory needs its slots."""
        return max(1, min(self._disk.run_blocks, self._host.table.slots.count // _PART))

    async def _write(self, blocks: Sequence[Block]) -> int:
        """Writes those of `blocks` that are still in memory; returns how many were written."""
        table = self._host.table
        held = [block for block in (table.hold(block.key) for block in blocks) if block is not None]
        views = [self._host.view(block) for block in held]
        lent: list[tuple[Block, memoryview]] = []
        try:
            lent = await self._lent(blocks)
            pairs = [*zip(held, views, strict=True), *lent]
            return await self._disk.write([pair for pair in pairs if self._host.find_block(pair[0].key) is not None])
        except Damaged as damaged:
            for block in damaged.blocks:
                self._log.warning("a block changed after it was stored", key=block.key.hex()[:16])
                table.condemn(block.key, block.epoch, self._now())
            return 0
        finally:
            for block, view in zip(held, views, strict=True):
                view.release()
                table.drop(block, self._now())
            for found in map(self._host.find_block, [block.key for block in blocks]):
                if found is not None and not self._disk.holds(found.key):
                    self._candidates.add(found)

    async def _lent(self, blocks: Sequence[Block]) -> list[tuple[Block, memoryview]]:
        """Those that are not in the arena, but in clients' pages; with copies that can be written."""
        there = (self._host.lent.find(block.key) for block in blocks if not self._host.in_arena(block.key))
        copies = [(block, await self._host.lent.read(block)) for block in there if block is not None]
        return [(block, copy) for block, copy in copies if copy is not None]

    def _find(self, key: bytes) -> Block | None:
        return self._host.find_block(key) or self._disk.table.find(key)

    async def _prefetch(self, keys: Sequence[bytes]) -> None:
        rest = keys[self._host.has_blocks(keys) :][: self._host.capacity() // 4]
        if self._disk.has_blocks(rest):
            self._disk.prefetched()
            await self._host.bringer.prefetch(rest, [self._disk], self._now() + _BRING_S)

    async def flush(self, seconds: float) -> None:
        """Writes all that has earned it, for at most `seconds`, and has the disk keep it. When `run` has ended."""
        before, until = len(self._candidates), self._now() + seconds
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while blocks := self._candidates.take(self._disk.run_blocks):
                    pause = self._disk.writes_wait_s(len(blocks))
                    if self._now() + pause > until:  # nothing more can be written in time
                        break
                    await asyncio.sleep(pause)
                    if not await self._write(blocks):
                        break
        with suppress(OSError):
            await self._disk.sync()
        if before:
            self._log.info("flushed", blocks=before - len(self._candidates), left=len(self._candidates))
