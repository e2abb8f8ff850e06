"""The page pool against a dictionary, and the bugs it must not let pass."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.engine.pages import PagePool

OWNERS = st.sampled_from(["a", "b", "c"])
KEYS = st.sampled_from([b"x", b"xx", b"xy", b"xxx", b"xxy", b"y"])
"""Each block follows that of the key without its last letter."""
TOTAL = 7


class PoolMachine(RuleBasedStateMachine):
    """`held` is the naive pool: (owner, page) -> holds; `named` are its names: key -> page."""

    most_idle = None

    def __init__(self):
        super().__init__()
        self.ticks = itertools.count()
        self.pool = PagePool(TOTAL, lambda: float(next(self.ticks)), most_idle=self.most_idle)
        self.held = Counter()
        self.named = {}

    def pages(self):
        return {page for (_, page), count in self.held.items() if count}

    def idle(self):
        return {key for key, page in self.named.items() if page not in self.pages()}

    @rule(owner=OWNERS, count=st.integers(0, 9))
    def allocate(self, owner, count):
        assert self.pool.can_allocate(count) == (count <= TOTAL - len(self.pages()))
        if not self.pool.can_allocate(count):
            return
        nameless, idle = TOTAL - len(self.pages()) - len(self.idle()), self.idle()
        pages = self.pool.allocate(owner, count)
        assert len(set(pages)) == count and not set(pages) & self.pages()
        assert all(1 <= page <= TOTAL for page in pages)
        gone = {key for key in idle if self.named[key] in pages}
        assert len(gone) == max(0, count - nameless), "pages without a key go first"
        assert not any(key[:-1] in gone for key in idle - gone), "none goes before the idle ones behind it"
        for key in gone:
            del self.named[key]
        self.held.update((owner, page) for page in pages)

    @precondition(lambda self: self.pages())
    @rule(owner=OWNERS, data=st.data())
    def hold(self, owner, data):
        page = data.draw(st.sampled_from(sorted(self.pages())))
        self.pool.hold(owner, [page])
        self.held[owner, page] += 1

    @precondition(lambda self: self.pages())
    @rule(key=KEYS, data=st.data())
    def name(self, key, data):
        page = data.draw(st.sampled_from(sorted(self.pages())))
        if key in self.named or page not in self.named.values():
            assert self.pool.name(page, key, key[:-1], len(key)) == self.named.setdefault(key, page)

    @precondition(lambda self: self.named)
    @rule(owner=OWNERS, data=st.data())
    def share(self, owner, data):
        page = self.named[data.draw(st.sampled_from(sorted(self.named)))]
        self.pool.share(owner, [page])
        self.held[owner, page] += 1

    @rule(page=st.integers(1, TOTAL))
    def forget(self, page):
        self.pool.forget([page])
        self.named = {key: other for key, other in self.named.items() if other != page}

    @precondition(lambda self: self.pages())
    @rule(data=st.data())
    def release(self, data):
        owner, page = data.draw(st.sampled_from(sorted(key for key, count in self.held.items() if count)))
        self.pool.release(owner, [page])
        self.held[owner, page] -= 1
        self._let_go()

    def _let_go(self):
        """Of the idle pages that are too many the pool has taken the names, those of the ends of chains first."""
        idle, most = self.idle(), TOTAL if self.most_idle is None else self.most_idle
        gone = {key for key in idle if self.pool.find(key) is None}
        assert len(gone) == max(0, len(idle) - most)
        assert not any(key[:-1] in gone for key in idle - gone), "none goes before the idle ones behind it"
        for key in gone:
            del self.named[key]

    @rule(owner=OWNERS, page=st.integers(1, TOTAL))
    def release_what_is_not_held(self, owner, page):
        if not self.held[owner, page]:
            with pytest.raises(AssertionError):
                self.pool.release(owner, [page])

    @rule(page=st.integers(1, TOTAL))
    def hold_what_is_free(self, page):
        if page not in self.pages():
            with pytest.raises(AssertionError):
                self.pool.hold("a", [page])
            with pytest.raises(AssertionError):
                self.pool.name(page, b"z", b"", 0)

    @invariant()
    def same_numbers(self):
        stats = self.pool.stats()
        per_page = Counter()
        for (_, page), count in self.held.items():
            per_page[page] += count
        assert stats.free == TOTAL - len(self.pages()) == self.pool.free
        assert stats.shared == sum(count > 1 for count in per_page.values())
        assert all(self.pool.holds(page) == per_page[page] for page in range(1, TOTAL + 1))
        for owner in "abc":
            holds = sum(count for (name, _), count in self.held.items() if name == owner)
            assert self.pool.held_by(owner) == holds
            assert (owner in self.pool.owners()) == (holds > 0)

    @invariant()
    def same_names(self):
        assert self.pool.stats().resident == len(self.named)
        for key in [b"x", b"xx", b"xy", b"xxx", b"xxy", b"y"]:
            assert self.pool.find(key) == self.named.get(key)
        for page in range(1, TOTAL + 1):
            assert self.pool.named(page) == (page in self.named.values())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


class BoundedMachine(PoolMachine):
    """As that, of a pool that keeps few idle pages."""

    most_idle = 2


TestBoundedPool = BoundedMachine.TestCase
TestBoundedPool.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.parametrize(("most_idle", "touched"), [(None, 100), (20, 30), (0, 10)])
def test_memory_is_touched_for_what_is_used_at_one_time_and_for_the_idle_pages(most_idle, touched):
    pool, seen = PagePool(100, most_idle=most_idle), set()
    for prompt in range(40):
        pages = pool.allocate("a", 10)
        seen.update(pages)
        for block, page in enumerate(pages):
            pool.name(page, b"%d %d" % (prompt, block), b"%d %d" % (prompt, block - 1), block)
        pool.release("a", reversed(pages))
        assert pool.free == 100
    assert len(seen) == touched


def test_what_was_used_again_stays():
    """Room is needed: a block that several used outlives one that nobody came back for."""
    seconds = [0.0]
    pool = PagePool(3, lambda: seconds[0])
    for number, key in enumerate([b"once", b"often", b"other"]):
        [page] = pool.allocate("a", 1)
        pool.name(page, key, b"", 0)
        pool.release("a", [page])
        seconds[0] += 1
        if number:
            pool.share("b", [page])
            pool.release("b", [page])
        seconds[0] += 1
    pool.allocate("c", 1)
    assert pool.find(b"once") is None and pool.find(b"often") is not None


def test_bounds():
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(0)
    with pytest.raises(AssertionError):
        PagePool(2).allocate("a", 3)
