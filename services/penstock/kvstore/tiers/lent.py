"""Blocks that clients of this host lend: they lie in the clients' own pages, and count as host memory.

The store maps those pages and only reads. It copies a block into the arena when somebody asks for it, when it is
promised, when its client will need the page, and when the client is gone: the mapping outlives the client, so its
blocks can be found all the time. A client ends a page's epoch before it writes to the page. So a copy is good if the
epoch is still the block's after the copy and the copy has the block's checksum; any other one is dropped, and counted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import structlog

from penstock.errors import InvalidRequest, Refused
from penstock.kv.bytes.arena import ArenaMap, Layout, MapError
from penstock.kv.bytes.copying import copy_and_sum
from penstock.kv.eviction.base import SEVERAL
from penstock.kvstore.table.blocks import Block, TierKind
from penstock.kvstore.table.shelf import TOGETHER_S, BlockWatcher
from penstock.kvstore.tiers.base import Room
from penstock.rpc.bounds import check_length
from penstock.runtime.threads import to_its_end

_BATCH_BYTES = 8 << 20
"""Copied in a thread at a time."""


@dataclass(frozen=True, slots=True)
class PagesAt:
    """Where a client's pages lie."""

    path: str
    size: int
    id: bytes
    layout: Layout
    behind: int = 0
    """Bytes of a block that are not in its page, but behind what is there."""


@dataclass(slots=True, eq=False)
class _Pages:
    """The pages of one attachment."""

    memory: ArenaMap
    layout: Layout
    behind: int
    by_slot: dict[int, Block] = field(default_factory=dict)
    """Each lends at most one block."""


class Arrivals(Protocol):
    """The host tier, as far as lent blocks need it."""

    def room(self) -> Room:
        """Slots for blocks that the store itself brings."""
        ...

    def capacity(self) -> int:
        """How many blocks the arena holds."""
        ...

    def in_arena(self, key: bytes) -> bool:
        """Whether the block has been copied."""
        ...


class LentBlocks:
    """Supplier. Used from the store's event loop; `thread` copies."""

    kind = TierKind.HOST

    def __init__(self, host: Arrivals, watcher: BlockWatcher, thread: Executor, now: Callable[[], float]) -> None:
        """`watcher` hears of lent blocks that can be found by now, or not any more."""
        self.torn = 0
        """Copies that were dropped: the page was used for something else, or its bytes were wrong."""
        self.rescued = 0
        """Blocks copied because their client was gone."""
        self._host = host
        self._watcher = watcher
        self._thread = thread
        self._now = now
        self._pages: dict[str, _Pages] = {}
        self._blocks: dict[bytes, Block] = {}
        self._orphans: deque[str] = deque()
        """Attachments that are gone, and whose blocks are still to be copied."""
        self._news = asyncio.Event()
        self._copying = 0
        self._turn = asyncio.Lock()
        self._log = structlog.get_logger("penstock.kvstore")

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def busy(self) -> bool:
        """Whether blocks are being copied, or still have to be."""
        return bool(self._copying or self._orphans)

    # -- what clients say

    def open(self, attachment: str, there: PagesAt, block_bytes: int) -> None:
        """Maps the pages of a client. Raises Refused when they can't be used."""
        if attachment in self._pages:
            raise InvalidRequest("the attachment has shown its pages already", field="pages")
        if there.layout.stride + there.behind != block_bytes:
            what = f"a page has {there.layout.stride} bytes, {there.behind} are behind it, a block has {block_bytes}"
            raise Refused(what, field="pages.slot_stride")
        try:
            memory = ArenaMap(there.path, there.size, there.id, there.layout, writable=False)
        except (MapError, ValueError) as error:
            raise Refused(str(error), field="pages.path") from error
        self._pages[attachment] = _Pages(memory, there.layout, there.behind)

    def lend(self, attachment: str, blocks: Sequence[tuple[Block, int]]) -> None:
        """Takes note of blocks, each in the page at an offset. A block that another client lends stays that one's.
        Raises InvalidRequest."""
        pages = self._of(attachment)
        for block, offset in blocks:
            check_length("blocks.behind", block.behind, pages.behind)
            try:
                pages.memory.block(offset, pages.layout.stride)
            except ValueError as error:
                raise InvalidRequest(str(error), field="blocks.offset") from error
        for block, offset in blocks:
            self._lend(pages, block, pages.layout.slot(offset))

    def _lend(self, pages: _Pages, block: Block, slot: int) -> None:
        there = self._blocks.get(block.key)
        if there is not None and there.owner != block.owner and there.owner not in self._orphans:
            return
        before = pages.by_slot.get(slot)
        if there is not None:
            self._forget(there, tell=False)
            block.uses, block.counted_at = there.uses, there.counted_at
        if before is not None and before is not there:
            self._forget(before)
        parent = self._blocks.get(block.parent)
        block.slot, block.used_at = slot, self._now()
        block.turn = parent.turn + (parent.uses > 0) if parent is not None else 0
        pages.by_slot[slot] = self._blocks[block.key] = block
        self._watcher.block_stored(block)

    def end(self, attachment: str, keys: Iterable[bytes]) -> None:
        """The client lends these no more."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None and block.owner == attachment:
                self._forget(block)

    def drop_tenant(self, namespace: bytes) -> None:
        """Takes no block of the tenant from its client's page any more."""
        for block in [block for block in self._blocks.values() if block.namespace == namespace]:
            self._forget(block)

    def _of(self, attachment: str) -> _Pages:
        pages = self._pages.get(attachment)
        if pages is None:
            raise InvalidRequest("the attachment has not shown its pages", field="pages")
        return pages

    def _forget(self, block: Block, *, tell: bool = True) -> None:
        del self._blocks[block.key]
        del self._pages[block.owner].by_slot[block.slot]
        if tell:
            self._watcher.block_removed(block)

    # -- finding and using

    def find(self, key: bytes) -> Block | None:
        """A lent block; to be read, not changed."""
        return self._blocks.get(key)

    def keys(self) -> Iterable[bytes]:
        """A live view of all keys."""
        return self._blocks.keys()

    def touch(self, key: bytes, session: str) -> Block | None:
        """Counts as a use of the block, if it is lent."""
        block = self._blocks.get(key)
        if block is not None:
            now = self._now()
            block.used_at = now
            if now - block.counted_at >= TOGETHER_S:
                block.uses += 1
                block.counted_at = now
            if session and session != block.session:
                block.session = SEVERAL if block.session else session
        return block

    # -- copying

    def has_blocks(self, keys: Sequence[bytes]) -> int:
        """Counts the leading keys that are lent."""
        count = 0
        while count < len(keys) and keys[count] in self._blocks:
            count += 1
        return count

    async def bring_blocks(self, keys: Sequence[bytes], room: Room, until: float) -> int:
        """Copies leading blocks into slots of `room`; returns how many are in the arena."""
        at = 0
        while at < len(keys) and self._now() < until:
            got = await self._copy(keys[at : at + self._step(room)], room)
            if not got:
                break
            at += got
        return at

    async def save(self, keys: Sequence[bytes]) -> int:
        """Copies those of the blocks that are lent and not in the arena; returns how many of all are there then."""
        missing = [key for key in keys if key in self._blocks and not self._host.in_arena(key)]
        room, at = self._host.room(), 0
        try:
            while at < len(missing):
                at += await self._copy(missing[at : at + self._step(room)], room) or 1  # one that fails is left out
                await asyncio.sleep(0)
        finally:
            room.close()
        return sum(map(self._host.in_arena, keys))

    def _step(self, room: Room) -> int:
        return max(1, _BATCH_BYTES // room.block_bytes)

    async def _copy(self, keys: Sequence[bytes], room: Room) -> int:
        """Copies blocks until one can't be had; returns how many leading ones are in the arena, maybe not all yet.

        One at a time, so that nobody misses a block because it is being copied for somebody else.
        """
        async with self._turn:
            return await self._copy_now(keys, room)

    async def _copy_now(self, keys: Sequence[bytes], room: Room) -> int:
        there = 0
        while there < len(keys) and self._host.in_arena(keys[there]):
            there += 1
        if there:
            return there
        plan: list[tuple[Block, Block, _Pages]] = []
        for block in map(self._blocks.get, keys):
            slot = room.reserve(block.wanted()).block if block is not None else None
            if block is None or slot is None:
                break
            slot.inherit(block)
            plan.append((block, slot, self._pages[block.owner]))
        ways = [_Way(room.view(slot), self._view(block, pages), block.behind) for block, slot, pages in plan]
        sums = await self._copied(ways) if ways else []
        good = 0
        for (block, slot, pages), digest in zip(plan, sums, strict=True):
            if not self._whole(block, pages, digest):
                break
            room.commit(slot, block.checksum)
            good += 1
        for _, slot, _ in plan[good:]:
            room.give_back(slot)
        return good

    async def read(self, block: Block) -> memoryview | None:
        """A copy of a lent block of the caller's own; None: it is gone."""
        if self._blocks.get(block.key) is not block:
            return None
        pages = self._pages[block.owner]
        copy = memoryview(bytearray(pages.layout.stride + pages.behind))
        [digest] = await self._copied([_Way(copy, self._view(block, pages), block.behind)])
        return copy if self._whole(block, pages, digest) else None

    async def _copied(self, ways: Sequence[_Way]) -> list[bytes]:
        self._copying += 1
        try:
            return await to_its_end(self._thread, partial(_copied, ways))
        finally:
            self._copying -= 1

    def _view(self, block: Block, pages: _Pages) -> memoryview:
        return pages.memory.block(pages.layout.offset(block.slot), pages.layout.stride)

    def _whole(self, block: Block, pages: _Pages, digest: bytes) -> bool:
        """Whether a copy is the block; if it is not, the block is lent no more."""
        if pages.memory.holds(pages.layout.offset(block.slot), block.epoch) and digest == block.checksum:
            return True
        self.torn += 1
        if self._blocks.get(block.key) is block:
            self._forget(block)
        return False

    # -- clients that are gone

    def leave(self, attachment: str) -> None:
        """The client is gone; its blocks are copied as far as there is room, and lent until then."""
        if attachment in self._pages:
            self._orphans.append(attachment)
            self._news.set()

    async def run(self) -> None:
        """Copies the blocks of clients that are gone, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._orphans:
                await self._rescue(self._orphans[0])
                self._drop(self._orphans.popleft())

    async def _rescue(self, attachment: str) -> None:
        """Those used last, as many as the arena holds; parents before their children."""
        blocks = sorted(self._pages[attachment].by_slot.values(), key=lambda block: -block.used_at)
        wanted = sorted(blocks[: self._host.capacity()], key=lambda block: block.first_token)
        saved = await self.save([block.key for block in wanted])
        self.rescued += saved
        self._log.info("blocks of a client that is gone were copied", blocks=saved, lent=len(blocks))

    def _drop(self, attachment: str) -> None:
        pages = self._pages[attachment]
        for block in list(pages.by_slot.values()):
            self._forget(block)
        del self._pages[attachment]  # and, with the last copy under way, the mapping

    def format(self) -> None:
        """Forgets everything, and tells nobody. Not while `busy`."""
        self._pages.clear()
        self._blocks.clear()

    def figures(self) -> Mapping[str, int]:
        """Numbers for metrics."""
        return {"lent": len(self), "lent_torn": self.torn, "lent_rescued": self.rescued}


@dataclass(frozen=True, slots=True)
class _Way:
    """Of a block into memory of its size."""

    target: memoryview
    page: memoryview
    behind: bytes


def _copied(ways: Sequence[_Way]) -> list[bytes]:
    """In a thread. Checksums of the copies."""
    return [_copy(way) for way in ways]


def _copy(way: _Way) -> bytes:
    size = way.page.nbytes
    way.target[size:] = way.behind
    return copy_and_sum(way.target[:size], way.page, way.behind)
