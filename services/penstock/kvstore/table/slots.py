"""The holders of slots."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from penstock.kvstore.table.clock import Deadlines, Wake, asleep


class Slots:
    """Slots 0 to count-1, each free, held, or resting. One owner, not thread-safe.

    Slots that were used before are handed out first, so that memory grows only with need; `frontier` is the first
    slot that never was.
    """

    def __init__(self, count: int, epochs: Iterable[int] | None = None, wake: Wake = asleep) -> None:
        self.count = count
        self.frontier = 0
        self.resting = 0
        self._free: list[int] = []
        self._epochs = iter(epochs or itertools.count(1))
        self._rests: Deadlines[int] = Deadlines(wake)

    @property
    def held(self) -> int:
        """Slots that have a holder."""
        return self.frontier - len(self._free) - self.resting

    @property
    def free(self) -> int:
        """How often `take` may be called."""
        return self.count - self.frontier + len(self._free)

    def available(self) -> bool:
        """Whether `take` may be called."""
        return bool(self._free) or self.frontier < self.count

    def take(self) -> tuple[int, int]:
        """A slot and the epoch of its new holder."""
        assert self.available(), "ask available first"
        if self._free:
            slot = self._free.pop()
        else:
            slot = self.frontier
            self.frontier += 1
        return slot, next(self._epochs)

    def give(self, slot: int) -> None:
        """Back from its holder, to be handed out again."""
        self._free.append(slot)

    def restore(self, held: Iterable[int]) -> None:
        """Has exactly these slots held, of a table that was filled before this process began."""
        assert self.frontier == 0, "only at the beginning"
        taken = set(held)
        self.frontier = max(taken, default=-1) + 1
        self._free = [slot for slot in reversed(range(self.frontier)) if slot not in taken]

    def rest(self, slot: int, until: float) -> None:
        """Takes a slot back from a holder that may still write; hands it out again only after `until`."""
        self.resting += 1
        self._rests.add(until, slot)

    def rested(self) -> float | None:
        """When the next slot has rested."""
        return self._rests.first()

    def expire(self, now: float) -> None:
        """Slots that have rested can be handed out."""
        for slot in self._rests.due(now):
            self.resting -= 1
            self._free.append(slot)
