"""The pool of pages and the holds on them.

The pool hands out page numbers, counts the holds on each and knows their owners. It never touches the contents.
Page 0 is never handed out: it stays all zeros, so that padding can point somewhere harmless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolStats:
    total: int
    """Pages that can be handed out."""
    free: int
    shared: int
    """Pages with more than one hold."""
    owners: int
    allocations: int
    """Pages handed out since the start."""


class PagePool:
    """Allocator of the pages 1..total. Ask with `can_allocate`, then `allocate`.

    Every hold is in an owner's name and is given back under that name; a page is free again when its last hold
    is gone. Releasing a page that the owner does not hold fails an assertion. Not thread-safe: one thread owns the
    pool.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one page, not {total}")
        self.total = total
        self._free = list(range(total, 0, -1))
        self._refs = [0] * (total + 1)
        self._held: dict[str, Counter[int]] = {}
        self._shared = 0
        self._allocations = 0

    @property
    def free(self) -> int:
        return len(self._free)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, owner: str, count: int) -> list[int]:
        """Hands out `count` pages with one hold by `owner` on each; the owner must release them."""
        assert 0 <= count <= len(self._free), "ask can_allocate first"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            assert self._refs[page] == 0, f"page {page} was free and held"
            self._refs[page] = 1
        if pages:
            self._held.setdefault(owner, Counter()).update(pages)
        self._allocations += count
        return pages

    def hold(self, owner: str, pages: Sequence[int]) -> None:
        """One more hold by `owner` on each of `pages`, each of which has a hold already."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is free and cannot be held"
            self._refs[page] += 1
            self._shared += self._refs[page] == 2
        if pages:
            self._held.setdefault(owner, Counter()).update(pages)

    def release(self, owner: str, pages: Iterable[int]) -> None:
        """Gives back one hold of `owner` on each of `pages`."""
        held = self._held.get(owner, Counter())
        for page in pages:
            assert held[page] > 0, f"{owner} releases page {page}, which it does not hold"
            held[page] -= 1
            if not held[page]:
                del held[page]
            self._drop(page)
        if not held:
            self._held.pop(owner, None)

    def _drop(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free.append(page)
        elif self._refs[page] == 1:
            self._shared -= 1

    def sole(self, pages: Iterable[int]) -> int:
        """How many of `pages` have a single hold, and so would be free if it were given back."""
        return sum(self._refs[page] == 1 for page in pages)

    def held_by(self, owner: str) -> int:
        """Holds in the name of `owner`."""
        return self._held.get(owner, Counter()).total()

    def owners(self) -> frozenset[str]:
        return frozenset(self._held)

    def stats(self) -> PoolStats:
        return PoolStats(self.total, self.free, self._shared, len(self._held), self._allocations)
