"""The engine's side of the seams in `hooks`: pages written by a source, pages lent to a sink."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from penstock.engine.forward.memory import PageMemory
from penstock.engine.hooks import Check, Source
from penstock.engine.scheduling.live import Live
from penstock.engine.scheduling.scheduler import Scheduler

_INLINE_BYTES = 1 << 18
"""Copies up to this size take less time than a trip to a thread."""


class LoadWriter:
    """PageWriter of one sequence. The pages belong to the sequence from the moment they are allocated; while a
    copy is under way in a thread, the copy holds them too, so that nobody else can get them."""

    def __init__(self, pool: PageMemory, scheduler: Scheduler, live: Live, released: Callable[[], None]) -> None:
        """`released` is called when a copy has let go of pages."""
        self._pool = pool
        self._released = released
        self._scheduler = scheduler
        self._live = live
        self._open = True
        self._copies: set[asyncio.Future[int]] = set()
        self._written = 0

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    @property
    def block_bytes(self) -> int:
        return self._pool.block_bytes

    @property
    def written(self) -> int:
        """Leading blocks that hold what was written; 0 when the pages were taken away."""
        return 0 if self._live.stripped else self._written

    @property
    def _usable(self) -> bool:
        return self._open and not self._live.stripped

    async def write(self, first_block: int, blocks: Sequence[Source], check: Check | None = None) -> int:
        """See PageWriter.write."""
        if any(block.nbytes != self.block_bytes for block in blocks):
            raise ValueError(f"a block of this engine has {self.block_bytes} bytes")
        if not self._usable:
            return 0
        if not 0 <= first_block <= len(self._live.pages):
            raise ValueError(f"block {first_block} leaves a gap after {len(self._live.pages)} blocks")
        count = self._make_room(first_block, len(blocks))
        if count:
            good = await self._copy(self._live.pages[first_block : first_block + count], blocks[:count], check)
            if first_block <= self._written:
                self._written = max(self._written, first_block + good)
            if good < count:  # the next page holds what was refused
                self._written = min(self._written, first_block + good)
            count = good
        return count if self._usable else 0

    def _make_room(self, first_block: int, wanted: int) -> int:
        """Allocates what is missing and may be had; running sequences keep a page each to grow."""
        live, scheduler = self._live, self._scheduler
        last = min(first_block + wanted, scheduler.limits.pages_for(live.length))
        spare = max(0, scheduler.pool.free - len(scheduler.running))
        grow = min(max(0, last - len(live.pages)), spare)
        if grow:
            scheduler.grow(live, grow)
        return max(0, min(last, len(live.pages)) - first_block)

    async def _copy(self, pages: Sequence[int], blocks: Sequence[Source], check: Check | None) -> int:
        if len(blocks) * self.block_bytes <= _INLINE_BYTES:
            return self._pool.write(pages, blocks, check)
        owner = f"copy to {self._live.owner}"
        self._scheduler.pool.hold(owner, pages)
        copy = asyncio.get_running_loop().run_in_executor(None, self._pool.write, pages, blocks, check)
        self._copies.add(copy)

        def done(_: asyncio.Future[int]) -> None:
            self._copies.discard(copy)
            self._scheduler.pool.release(owner, pages)
            self._released()

        copy.add_done_callback(done)
        return await asyncio.shield(copy)

    def close(self) -> None:
        """Later writes touch nothing."""
        self._open = False

    async def drain(self) -> None:
        """Waits for copies that their callers no longer wait for."""
        while self._copies:
            await asyncio.wait(self._copies)


class LentPage:
    """PageRef: one hold on one page."""

    def __init__(self, pool: PageMemory, page: int, give_back: Callable[[int], None]) -> None:
        self._pool = pool
        self._page = page
        self._give_back: Callable[[int], None] | None = give_back

    def view(self) -> memoryview:
        assert self._give_back is not None, "the page was released"
        return self._pool.view(self._page)

    def read_into(self, destination: memoryview) -> None:
        assert self._give_back is not None, "the page was released"
        self._pool.read_into(self._page, destination)

    def release(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self._page)
