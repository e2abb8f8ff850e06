"""Pages by content: which page holds the block of a key, and which block leaves when room is needed.

A named page holds its block for as long as it has the name, whether somebody holds the page or not. Those that nobody
holds are idle. They leave in the order of a store's eviction policy, and a block never before the idle ones behind it.
A tenant that has more than its share of the idle pages loses its own first, as in a store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from penstock.kv.eviction.base import EvictionPolicy
from penstock.kv.eviction.shares import TenantShares
from penstock.kv.eviction.worth import Worth


@dataclass(eq=False, slots=True, kw_only=True)
class NamedPage:
    """A full block in a page. An `Owned` block, see there for the fields after `page`."""

    key: bytes
    parent: bytes
    """The key of the block before it."""
    page: int
    namespace: bytes
    first_token: int
    used: int
    used_at: float
    uses: int = 0
    idle: bool = False
    turn: int = 0
    seconds: float = 0.0
    session: str = ""
    note: Any = None


class NameWatcher(Protocol):
    """Hears of every block that gets a page or loses it, at once and in order. It must not change the pool."""

    def block_named(self, key: bytes) -> None:
        """A page holds the block from now on."""

    def block_forgotten(self, key: bytes) -> None:
        """No page holds the block any more."""


class NamedPages:
    """The names of a pool's pages. The pool says when a page becomes idle and when it is held again."""

    def __init__(self, clock: Callable[[], float], tenant_share: float) -> None:
        """`clock` gives seconds. A tenant's share is `tenant_share` of the most pages that were idle; 1: no bound."""
        self.watchers: list[NameWatcher] = []
        self._clock = clock
        self._worth: Worth[NamedPage] = Worth(clock)
        """Knows of all named pages."""
        self._shares = TenantShares(self._worth, tenant_share) if tenant_share < 1 else None
        """Counts those that are idle, without those that are chosen."""
        self._policy: EvictionPolicy[NamedPage] = self._worth if self._shares is None else self._shares
        """Chooses from idle pages."""
        self._by_key: dict[bytes, NamedPage] = {}
        self._by_page: dict[int, NamedPage] = {}
        self._idle_children: Counter[bytes] = Counter()
        """Idle pages by the key of the block before theirs, without those that are chosen."""
        self._chosen: dict[bytes, NamedPage] = {}
        """Idle pages that leave next, the first first."""
        self._ticks = 0
        self.idle = 0
        """Named pages that nobody holds."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    @property
    def chosen(self) -> int:
        """Idle pages of which it is settled that they leave next."""
        return len(self._chosen)

    def keys(self) -> Iterable[bytes]:
        """Of all blocks."""
        return self._by_key.keys()

    def find(self, key: bytes) -> int | None:
        """The page that holds the block, or None."""
        named = self._by_key.get(key)
        return None if named is None else named.page

    def of(self, namespaces: Collection[bytes]) -> list[NamedPage]:
        """The named pages of these namespaces, those behind others first."""
        found = [named for named in self._by_key.values() if named.namespace in namespaces]
        return sorted(found, key=lambda named: -named.first_token)

    def add(self, page: int, key: bytes, parent: bytes, first_token: int, *, namespace: bytes) -> None:
        """Names a page that somebody holds. Neither the page nor the key has the other already."""
        assert page not in self._by_page and key not in self._by_key
        self._ticks += 1
        named = NamedPage(
            key=key,
            parent=parent,
            page=page,
            namespace=namespace,
            first_token=first_token,
            used=self._ticks,
            used_at=self._clock(),
        )
        self._by_key[key] = self._by_page[page] = named
        self._worth.block_stored(named)
        for watcher in self.watchers:
            watcher.block_named(key)

    def use(self, page: int) -> None:
        """Notes that one more sequence uses the block in a named page, which is not idle any more."""
        named = self._by_page[page]
        self._ticks += 1
        named.used, named.used_at = self._ticks, self._clock()
        named.uses += 1
        self._worth.block_used(named)
        if named.idle:
            self._wake(named)

    def rest(self, page: int) -> bool:
        """Makes a page that nobody holds any more idle; False when it has no name, and so is free."""
        named = self._by_page.get(page)
        if named is None:
            return False
        named.idle = True
        self.idle += 1
        self._join(named)
        return True

    def choose(self, count: int) -> list[bytes]:
        """Settles which blocks leave next, up to `count` of them, in order; returns their keys. One that is used, or
        followed by another idle one, meanwhile may stay after all."""
        while len(self._chosen) < count and (named := self._policy.next_victim()) is not None:
            self._chosen[named.key] = named
            self._part(named)
        return list(islice(self._chosen, count))

    def evict(self) -> int:
        """Takes the name from the idle page that should go first, and returns the page. There must be an idle one."""
        named = next(iter(self._chosen.values()), None) or self._policy.next_victim()
        assert named is not None, "no page is idle"
        self._remove(named)
        return named.page

    def forget(self, page: int) -> bool:
        """Takes a page's name, if it has one; True when that page was idle, and so is free now."""
        named = self._by_page.get(page)
        if named is None:
            return False
        idle = named.idle
        self._remove(named)
        return idle

    def _remove(self, named: NamedPage) -> None:
        del self._by_key[named.key], self._by_page[named.page]
        if named.idle:
            self._wake(named)
        self._worth.block_removed(named)
        for watcher in self.watchers:
            watcher.block_forgotten(named.key)

    def _wake(self, named: NamedPage) -> None:
        """The page is not idle any more."""
        named.idle = False
        self.idle -= 1
        if self._shares is not None:
            self._shares.count_out(named)
        if self._chosen.pop(named.key, None) is None:
            self._policy.withdraw_block(named)
            self._part(named)

    def _join(self, named: NamedPage) -> None:
        """One more that the policy chooses from, unless idle ones follow it; the block before it has to wait for it."""
        while True:
            self._idle_children[named.parent] += 1
            if self._shares is not None:
                self._shares.count_in(named)
            self._offer(named)
            parent = self._by_key.get(named.parent)
            if parent is None:
                return
            if self._chosen.pop(parent.key, None) is None:
                self._policy.withdraw_block(parent)
                return
            named = parent

    def _part(self, named: NamedPage) -> None:
        """It is not one of those that the policy chooses from; the block before it may be the last of its chain now."""
        self._idle_children[named.parent] -= 1
        if not self._idle_children[named.parent]:
            del self._idle_children[named.parent]
            parent = self._by_key.get(named.parent)
            if parent is not None:
                self._offer(parent)

    def _offer(self, named: NamedPage) -> None:
        if named.idle and named.key not in self._idle_children and named.key not in self._chosen:
            self._policy.offer_block(named)
