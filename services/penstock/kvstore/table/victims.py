"""Blocks that leave in two steps, because their bytes are to be saved in between."""

from __future__ import annotations

from collections.abc import Callable

from penstock.kvstore.table.blocks import Block
from penstock.kvstore.table.shelf import Shelf


class Victims:
    """Held victims of one table; `expire` is the table's."""

    def __init__(self, shelf: Shelf, *, expire: Callable[[float], None]) -> None:
        self._shelf = shelf
        self._expire_all = expire

    def hold(self, now: float) -> Block | None:
        """Pins the block that would be evicted next, until `spare` or `discard`; None when none may go.

        Its parent may go from now on, as if it had left already. So the victims of several calls are those of as
        many evictions.
        """
        self._expire_all(now)
        victim = self._shelf.policy.next_victim()
        if victim is not None:
            self._shelf.held += 1
            self._shelf.pin(victim)
            self._shelf.leaving.add(victim.epoch)
            self._shelf.drop_child(victim.parent)
        return victim

    def spare(self, victim: Block, now: float) -> None:
        """The victim stays. Spare children before their parents."""
        if victim.epoch in self._shelf.leaving:
            self._shelf.leaving.remove(victim.epoch)
            self._shelf.add_child(victim.parent)
        self._shelf.held -= 1
        self._shelf.unpin(victim, now)

    def discard(self, victim: Block, now: float) -> bool:
        """Evicts the victim. False: it is needed by now, and was spared."""
        if victim.pins > 1 or victim.key in self._shelf.tree or victim.epoch not in self._shelf.leaving:
            self.spare(victim, now)
            return False
        self._shelf.held -= 1
        victim.pins = 0
        self._shelf.evict(victim)
        return True
