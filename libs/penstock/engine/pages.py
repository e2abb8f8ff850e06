"""The pool of pages, the holds on them and the names of what they hold.

The pool hands out page numbers, counts the holds on each and knows their owners. It never touches the contents; others
tell it when a page holds a full block, by its key. Such a page keeps its block when nobody holds it any more, until its
room is needed. So does a tail: a page with the leading rows of a block that is not full, which others may copy. A page
may have the far part of a block alone (see penstock.kv.parts); then it has the block's far key. Page 0 is never handed
out: it stays all zeros, so that padding can point somewhere harmless.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from penstock.engine.beginnings import Beginnings
from penstock.engine.named import NamedPages, NameWatcher
from penstock.kv.parts import is_far_key

TAIL_SHARE = 16
"""Tails that nobody holds may be one for so many blocks that nobody holds; when room is needed, those beyond that leave
before a block does. If all of them did, none would outlive the next request, as a pool is full most of the time. A
session needs one tail, which no store has, and many blocks."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    total: int
    """Pages that can be handed out."""
    free: int
    """Pages that nobody holds."""
    resident: int
    """Pages that hold a block under its key, held or not."""
    shared: int
    """Pages with more than one hold."""
    owners: int
    allocations: int
    """Pages handed out since the start."""


class PagePool:
    """Allocator of the pages 1..total. Ask with `can_allocate`, then `allocate`.

    Every hold is in an owner's name and is given back under that name; a page is free again when its last hold
    is gone. A free page that has a key or a tail can be held again for what is in it, until it is allocated for
    something else. Pages that were given back are handed out before others, and of those with something in them only
    so many are kept: memory that was never touched is touched as late as possible. Releasing a page that the owner
    does not hold fails an assertion.
    Not thread-safe: one thread owns the pool.
    """

    def __init__(
        self,
        total: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        most_idle: int | None = None,
        tenant_share: float = 1.0,
    ) -> None:
        """`clock` gives seconds, for the order in which blocks leave. At most `most_idle` pages keep a block that
        nobody uses; None: all may. Tenants that have more than `tenant_share` of those lose theirs first."""
        if total < 1:
            raise ValueError(f"a pool needs at least one page, not {total}")
        self.total = total
        self._free = list(range(total, 0, -1))
        """Those without anything in them."""
        self._named = NamedPages(clock, tenant_share)
        self._beginnings = Beginnings()
        self._tails: OrderedDict[int, None] = OrderedDict()
        """Tails that nobody holds, the one that was given back first before the others."""
        self._most_idle = total if most_idle is None else most_idle
        self.trimmer: Callable[[], None] = self.trim
        """Called whenever there are idle blocks over that number: has them leave, at once or soon."""
        self._far: set[int] = set()
        """Pages with the far part of a block and nothing else."""
        self._refs = [0] * (total + 1)
        self._held: dict[str, Counter[int]] = {}
        self._shared = 0
        self._allocations = 0

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free) + len(self._tails) + self._named.idle

    def can_allocate(self, count: int) -> bool:
        return count <= self.free

    def allocate(self, owner: str, count: int) -> list[int]:
        """Hands out `count` pages with one hold by `owner` on each; the owner must release them. Pages with nothing in
        them come first, then tails beyond their share, then those whose block is worth least; none has a key or a tail
        afterwards."""
        assert 0 <= count <= self.free, "ask can_allocate first"
        pages = [self._free.pop() if self._free else self._vacate() for _ in range(count)]
        for page in pages:
            assert self._refs[page] == 0, f"page {page} was free and held"
            self._refs[page] = 1
        if pages:
            self._held.setdefault(owner, Counter()).update(pages)
            self._far.difference_update(pages)
        self._allocations += count
        return pages

    def hold(self, owner: str, pages: Sequence[int]) -> None:
        """One more hold by `owner` on each of `pages`, each of which has a hold already."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is free and cannot be held"
        self._add(owner, pages)

    def share(self, owner: str, pages: Sequence[int]) -> None:
        """One more hold by `owner`, who uses the blocks in `pages`, each of which has a key."""
        for page in pages:
            self._named.use(page)
        self._add(owner, pages)

    def borrow(self, owner: str, page: int) -> None:
        """One more hold by `owner`, who copies rows of the page: see `longest`."""
        if page in self._named:
            self._named.use(page)
        else:
            self._tails.pop(page, None)
        self._add(owner, [page])

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

    def _add(self, owner: str, pages: Sequence[int]) -> None:
        for page in pages:
            self._refs[page] += 1
            self._shared += self._refs[page] == 2
        if pages:
            self._held.setdefault(owner, Counter()).update(pages)

    def _drop(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page] == 0:
            if not self._named.rest(page):
                self._rest(page)
            if self.over:
                self.trimmer()
        elif self._refs[page] == 1:
            self._shared -= 1

    def _rest(self, page: int) -> None:
        """A page without a key is given back: its tail stays, unless another page has the same rows."""
        if page in self._beginnings and not self._beginnings.repeated(page):
            self._tails[page] = None
            if len(self._tails) <= -(-self._most_idle // TAIL_SHARE):
                return
            page, _ = self._tails.popitem(last=False)
        self._beginnings.remove(page)
        self._free.append(page)

    def _vacate(self) -> int:
        """Takes away what is in the page that should go first, and returns the page."""
        page = self._tails.popitem(last=False)[0] if self._spare_tails else self._named.evict()
        self._beginnings.remove(page)
        return page

    @property
    def _spare_tails(self) -> int:
        """Tails that leave before the next block does."""
        return max(0, len(self._tails) - self._named.idle // TAIL_SHARE)

    # Names

    def watch(self, watcher: NameWatcher) -> None:
        """Tells the watcher of every block that gets a page or loses it, from now on."""
        self._named.watchers.append(watcher)

    def keys(self) -> Iterable[bytes]:
        """The keys of all blocks that pages hold; a live view."""
        return self._named.keys()

    def find(self, key: bytes) -> int | None:
        """The page that holds the block of this key; None when no page does. `share` it before the next `allocate`."""
        return self._named.find(key)

    def choose(self, count: int) -> list[bytes]:
        """Settles which `count` blocks leave next, fewer when fewer are idle; returns their keys in order. Those that
        somebody uses meanwhile stay."""
        return self._named.choose(count)

    @property
    def chosen(self) -> int:
        """Blocks of which it is settled that they leave next."""
        return self._named.chosen

    @property
    def unnamed(self) -> int:
        """Pages that can be allocated before a block leaves for one."""
        return len(self._free) + self._spare_tails

    @property
    def over(self) -> int:
        """Idle blocks beyond those that may stay."""
        return max(0, self._named.idle - self._most_idle)

    def trim(self, most: int | None = None) -> None:
        """Has idle blocks leave until as many are left as may stay, `most` of them at most."""
        for _ in range(self.over if most is None else min(most, self.over)):
            page = self._named.evict()
            self._beginnings.remove(page)
            self._free.append(page)

    def name(self, page: int, key: bytes, parent: bytes, first_token: int, *, namespace: bytes = b"") -> int:
        """Says that `page`, which is held, holds the block of `key` from now on, which follows that of `parent`;
        nobody writes to the page while it has the key. `namespace` is the same for all blocks of a tenant, and of no
        other. Returns the page that holds the block: another one when the key was there already, and then `page` gets
        none."""
        assert self._refs[page] > 0, f"page {page} is free and gets no key"
        assert (page in self._far) == is_far_key(key), f"page {page} has another part of the block"
        there = self._named.find(key)
        if there is None:
            self._named.add(page, key, parent, first_token, namespace=namespace)
        return page if there is None else there

    def named(self, page: int) -> bool:
        """Whether the page has a key, so that nobody may write to it."""
        return page in self._named

    def forget(self, pages: Iterable[int]) -> None:
        """Takes the keys and tails of `pages`, so that nobody finds what is in them; holds stay."""
        for page in pages:
            self._beginnings.remove(page)
            if self._named.forget(page) or page in self._tails:
                self._tails.pop(page, None)
                self._free.append(page)

    def drop(self, namespaces: Collection[bytes]) -> tuple[int, int]:
        """Takes the keys and tails of all pages of these namespaces, which are the roots of their chains; holds stay.
        Returns how many blocks nobody finds any more, and how many of them are in pages that somebody holds."""
        named = self._named.of(namespaces)
        held = sum(self._refs[one.page] > 0 for one in named)
        tails = [page for one in namespaces for page in self._beginnings.of(one) if page not in self._named]
        self.forget([*tails, *(one.page for one in named)])
        return len(named), held

    # Parts

    def note_parts(self, pages: Iterable[int], far: Iterable[bool]) -> None:
        """Says of pages that are held and have no key whether they get the far part of a block alone."""
        for page, alone in zip(pages, far, strict=True):
            (self._far.add if alone else self._far.discard)(page)

    def far(self, page: int) -> bool:
        """Whether it has the far part of a block alone."""
        return page in self._far

    # Rows

    def rows(self, page: int, parent: bytes, tokens: bytes, *, namespace: bytes = b"") -> None:
        """Says that the first rows of `page`, which is held, are those of `tokens` (see `packed`), which follow the
        block of `parent`: all of a block that has its key, or a tail, of a namespace as in `name`. Nobody writes to
        these rows while it is known."""
        assert self._refs[page] > 0, f"page {page} is free and has no rows"
        self._beginnings.put(page, parent, tokens, namespace)

    def longest(self, parent: bytes, tokens: bytes) -> tuple[int, int]:
        """(A page with the most leading rows of the block of `tokens` that follows that of `parent`, number of these
        rows); no rows when there is none. `borrow` it before the next `allocate`."""
        return self._beginnings.longest(parent, tokens)

    # Counts

    def holds(self, page: int) -> int:
        """How many holds there are on the page."""
        return self._refs[page]

    def held_by(self, owner: str) -> int:
        """Holds in the name of `owner`."""
        return self._held.get(owner, Counter()).total()

    def owners(self) -> frozenset[str]:
        return frozenset(self._held)

    def stats(self) -> PoolStats:
        return PoolStats(self.total, self.free, len(self._named), self._shared, len(self._held), self._allocations)
