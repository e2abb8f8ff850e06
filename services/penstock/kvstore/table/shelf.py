"""The blocks that can be found: their slots, their prefix tree, their pins, and the order in which they go."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

from penstock.kv.eviction.base import SEVERAL
from penstock.kvstore.table.blocks import Block, BlockPolicy
from penstock.kvstore.table.promises import Promises
from penstock.kvstore.table.slots import Slots
from penstock.kvstore.table.tree import Tree

TOGETHER_S = 1.0
"""Uses of a block within this time count as one: prefill stores what decode leases at once, for the same request."""


class BlockWatcher(Protocol):
    """Hears of every block that comes or goes, at once and in order."""

    def block_stored(self, block: Block) -> None:
        """The block can be found from now on."""

    def block_removed(self, block: Block) -> None:
        """The block can't be found any more."""


class Watcher(BlockWatcher, Protocol):
    """Hears also of who holds which slot."""

    def slot_held(self, slot: int, epoch: int) -> None:
        """The slot is held by `epoch` from now on; 0: by none. Called before it gets another holder."""


class Shelf:
    """Part of a BlockTable, whose other parts change it. All other code goes through the table."""

    def __init__(
        self, slots: Slots, watcher: Watcher, *, policy: BlockPolicy, promises: Promises, cooling_s: float
    ) -> None:
        self.tree = Tree()
        self.tick = 0
        """Counts calls; orders uses."""
        self.held = 0
        """Blocks pinned by the store itself."""
        self.detached = 0
        """Quarantined and discarded blocks that are still pinned."""
        self.evictions = self.quarantined = 0
        self.leaving: set[int] = set()
        """Epochs of held victims: their parents may go already."""
        self.policy = policy
        self._slots = slots
        self._watcher = watcher
        self._promises = promises
        self._cooling_s = cooling_s
        self._blocks: dict[bytes, Block] = {}

    # -- finding

    @property
    def room(self) -> int:
        """Blocks that it has room for."""
        return self._slots.count

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def keys(self) -> Iterable[bytes]:
        """All stored keys."""
        return self._blocks.keys()

    def find(self, key: bytes) -> Block | None:
        """A stored block."""
        return self._blocks.get(key)

    def leading(self, keys: Sequence[bytes]) -> list[Block]:
        """The leading stored blocks."""
        found = self._blocks
        return [found[key] for key in itertools.takewhile(found.__contains__, keys)]

    # -- using

    def pin_used(self, blocks: Iterable[Block], session: str, now: float) -> None:
        """Pins blocks for a lease, which uses them."""
        self.tick += 1
        for block in blocks:
            self.pin(block)
            self.use(block, session, now)

    def pin(self, block: Block) -> None:
        """The block stays where it is."""
        if block.pins == 0:
            self.policy.withdraw_block(block)
        block.pins += 1

    def unpin(self, block: Block, now: float) -> None:
        """One pin less. A block that was quarantined or discarded meanwhile leaves its slot with the last."""
        block.pins -= 1
        if block.pins:
            return
        if self._blocks.get(block.key) is block:
            self.offer(block)
        else:
            self.detached -= 1
            self.rest(block, now)

    def use(self, block: Block, session: str, now: float) -> None:
        """Counts as a use, which renews a promise."""
        block.used, block.used_at = self.tick, now
        if now - block.counted_at >= TOGETHER_S:
            block.uses += 1
            block.counted_at = now
        self.policy.block_used(block)
        if block.retained_until:
            self._promises.refresh([block.key], now)
            block.retained_until = self._promises.until(block.key)
        if session and session != block.session:
            block.session = SEVERAL if block.session else session

    def offer(self, block: Block) -> None:
        """Tells the policy that a block may go, if it may."""
        if block.pins == 0 and block.key not in self.tree:
            self.policy.offer_block(block)

    # -- coming and going

    def take_slot(self) -> tuple[int, int] | None:
        """A slot and its epoch; the policy's victim goes for it if need be. None: nothing may go."""
        if not self._slots.available():
            victim = self.policy.next_victim()
            if victim is None:
                return None
            self.evict(victim)
        slot, epoch = self._slots.take()
        self._watcher.slot_held(slot, epoch)
        return slot, epoch

    def enlist(self, block: Block, now: float) -> None:
        """A reserved block's bytes are in place: it can be found. Its parent has been told by `add_child`."""
        block.used, block.used_at, block.counted_at = self.tick, now, now
        block.retained_until = self._promises.until(block.key)
        self._blocks[block.key] = block
        self.policy.block_stored(block)
        self.offer(block)
        self._watcher.block_stored(block)

    def restore(self, blocks: Sequence[Block], now: float) -> None:
        """Fills an empty shelf with blocks that were stored before, the longest unused first. No watcher is told."""
        self._slots.restore(block.slot for block in blocks)
        for block in blocks:
            self.tick += 1
            block.used, block.used_at = self.tick, now
            self._blocks[block.key] = block
            self.tree.add(block.parent)
        for block in blocks:
            self.policy.block_stored(block)
        for block in blocks:
            self.offer(block)

    def evict(self, block: Block) -> None:
        """A block that may go goes."""
        self.evictions += 1
        self._unlist(block)
        self.free(block)

    def condemn(self, block: Block, now: float) -> None:
        """Takes a block out of service; its slot is free when the last reader is gone and it has rested."""
        self.quarantined += 1
        self.policy.withdraw_block(block)
        self._unlist(block)
        if block.pins:
            self.detached += 1
        else:  # its bytes changed after the commit: whoever did that may not be done
            self.rest(block, now)

    def discard(self, block: Block) -> None:
        """A block goes that nobody wants any more; its slot is free at once, or with its last reader."""
        self.policy.withdraw_block(block)
        self._unlist(block)
        if block.pins:
            self.detached += 1
        else:
            self.free(block)

    def _unlist(self, block: Block) -> None:
        del self._blocks[block.key]
        self.policy.block_removed(block)
        if block.epoch in self.leaving:
            self.leaving.remove(block.epoch)
        else:
            self.drop_child(block.parent)
        self._watcher.block_removed(block)

    def free(self, block: Block) -> None:
        """The block's slot has no holder, and may be used at once."""
        self._watcher.slot_held(block.slot, 0)
        self._slots.give(block.slot)

    def rest(self, block: Block, now: float) -> None:
        """The block's slot has no holder, but its writer may still be writing."""
        self._watcher.slot_held(block.slot, 0)
        self._slots.rest(block.slot, now + self._cooling_s)

    # -- the prefix tree

    def add_child(self, parent: bytes) -> None:
        """A block names `parent`, which may not go before it."""
        self.tree.add(parent)
        block = self._blocks.get(parent)
        if block is not None:
            self.policy.withdraw_block(block)

    def drop_child(self, parent: bytes) -> None:
        """A block that named `parent` is gone."""
        if self.tree.drop(parent) and (block := self._blocks.get(parent)) is not None:
            self.offer(block)
