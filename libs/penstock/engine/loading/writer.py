"""Pages of one sequence that a source fills."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress

from penstock.engine.hooks import Copy, Source
from penstock.engine.loading.fetches import BlockFetch, Fetches
from penstock.engine.scheduling.live import Live
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.step.memory import PageMemory
from penstock.runtime.threads import to_its_end

_INLINE_BYTES = 1 << 18
"""Copies up to this size take less time than a trip to a thread."""


class LoadWriter:
    """Writes loaded blocks into the pages of one sequence; a PartedWriter. The pages belong to the
    sequence from the moment they are allocated; while a thread copies, the copy holds them too, so that no other
    sequence can get them."""

    def __init__(
        self, memory: PageMemory, scheduler: Scheduler, live: Live, threads: Executor, fetches: Fetches
    ) -> None:
        """`threads` copy large blocks; `fetches` are those of all loads of the engine."""
        self._memory = memory
        self._fetches = fetches
        self._fetch: BlockFetch | None = None
        self._scheduler = scheduler
        self._live = live
        self._threads = threads
        self._open = True
        self._copies = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._written = live.named
        self._far = 0
        """Leading blocks of which it is enough to take the far part."""

    @property
    def block_size(self) -> int:
        """Tokens of KV in one block, which fills one page."""
        return self._memory.block_size

    @property
    def block_bytes(self) -> int:
        """Length of one block in bytes; `write` raises ValueError for a source of any other length."""
        return self._memory.block_bytes

    @property
    def written(self) -> int:
        """Leading blocks that were written or taken and are still there; 0 when the pages were taken away."""
        return 0 if self._live.stripped else self._written

    @property
    def _usable(self) -> bool:
        return self._open and not self._live.stripped and not self._live.gone

    async def write(self, first_block: int, blocks: Sequence[Source], copy: Copy | None = None, *, far: int = 0) -> int:
        """Copies blocks to the pages from `first_block` on; returns how many were stored. Of the first `far` of those
        in host memory `copy` copies the far part alone.

        Returns 0 when the load was closed or its pages were taken away, also while the copy ran. Up to 256 KiB are
        copied at once on the event loop; more are copied by a thread, whose copy runs to its end when the caller is
        cancelled. ValueError for a block of another length, or for a gap before `first_block`.
        """
        if any(block.nbytes != self.block_bytes for block in blocks):
            raise ValueError(f"a block of this engine has {self.block_bytes} bytes")
        if not self._usable:
            return 0
        held = len(self._live.pages)
        if not 0 <= first_block <= held:
            raise ValueError(f"block {first_block} leaves a gap after {held} blocks")
        if first_block < self._live.named:
            raise ValueError(f"block {first_block} is one of {self._live.named} that others may share")
        count = self._scheduler.room_for(self._live, first_block, len(blocks))
        if count:
            pages, blocks = self._live.pages[first_block : first_block + count], blocks[:count]
            parted = [isinstance(block, memoryview) and index < far for index, block in enumerate(blocks)]
            self._scheduler.note_parts(pages, parted)
            good = await self._copy(pages, blocks, copy, far)
            if first_block <= self._written:
                self._written = max(self._written, first_block + good)
            if good < count:  # the next page holds a refused block
                self._written = min(self._written, first_block + good)
            count = good
        return count if self._usable else 0

    async def take(self, first_block: int, blocks: int, within_s: float | None = None) -> int:
        """Takes blocks from pages of this engine, see PageWriter; waits while another load fetches the next one, for
        `within_s` at most. 0 when the load was closed or its pages were taken away."""
        self._end_fetch()
        chain = self._live.chain
        if chain is None or first_block > self._written:
            return 0
        taken, before = self._take(first_block, blocks), -1
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while first_block + taken < min(blocks, len(chain.keys)) and before < taken and self._usable:
                    fetch = self._fetches.of(chain.keys[first_block + taken])
                    if fetch is None:
                        break
                    await fetch.over.wait()
                    before, taken = taken, taken + self._take(first_block + taken, blocks)
        if self._usable:
            self._fetch = self._fetches.begin(chain.keys[first_block + taken : blocks])
        return taken

    def _take(self, first_block: int, blocks: int) -> int:
        taken = self._scheduler.take(self._live, first_block, blocks, self._far) if self._usable else 0
        self._written = max(self._written, first_block + taken)
        return taken

    def settled(self, blocks: int) -> None:
        """Lets other sequences share the first `blocks` blocks, and those who wait for more go on."""
        if self._usable:
            self._scheduler.settled(self._live, min(blocks, self._written))
        self._end_fetch()

    def far_is_enough(self, blocks: int) -> None:
        """Says of how many leading blocks it is enough to take the far part, from now on."""
        self._far = blocks

    def lacking(self, blocks: int) -> int:
        """The first block whose near part is lacking when the prefix ends behind so many; `blocks`: none is."""
        return self._scheduler.lacking(self._live, blocks) if self._usable else blocks

    def give_back(self, first_block: int) -> None:
        """Gives back the pages from that block on."""
        if self._usable:
            self._scheduler.give_back(self._live, first_block)
            self._written = min(self._written, first_block)

    def _end_fetch(self) -> None:
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            self._fetches.end(fetch)

    async def _copy(self, pages: Sequence[int], blocks: Sequence[Source], copy: Copy | None, far: int) -> int:
        if len(blocks) * self.block_bytes <= _INLINE_BYTES:
            return self._memory.write(pages, blocks, copy, far=far)
        owner = f"copy to {self._live.owner}"
        self._scheduler.hold(owner, pages)
        self._copies += 1
        self._idle.clear()
        try:
            return await to_its_end(self._threads, lambda: self._memory.write(pages, blocks, copy, far=far))
        finally:
            self._scheduler.release(owner, pages)
            self._copies -= 1
            if not self._copies:
                self._idle.set()

    def close(self) -> None:
        """Makes later writes return 0 without touching a page."""
        self._open = False
        self._end_fetch()

    async def drain(self) -> None:
        """Waits until every copy has ended, also copies whose caller has been cancelled."""
        await self._idle.wait()
