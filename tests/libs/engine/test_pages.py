"""The page pool against a dictionary, and the bugs it must not let pass."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.engine.pages import PagePool

OWNERS = st.sampled_from(["a", "b", "c"])


class PoolMachine(RuleBasedStateMachine):
    """`held` is the naive pool: (owner, page) -> holds."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(7)
        self.held = Counter()

    def pages(self):
        return {page for (_, page), count in self.held.items() if count}

    @rule(owner=OWNERS, count=st.integers(0, 9))
    def allocate(self, owner, count):
        assert self.pool.can_allocate(count) == (count <= 7 - len(self.pages()))
        if self.pool.can_allocate(count):
            pages = self.pool.allocate(owner, count)
            assert len(set(pages)) == count and not set(pages) & self.pages()
            assert all(1 <= page <= 7 for page in pages)
            self.held.update((owner, page) for page in pages)

    @precondition(lambda self: self.pages())
    @rule(owner=OWNERS, data=st.data())
    def hold(self, owner, data):
        page = data.draw(st.sampled_from(sorted(self.pages())))
        self.pool.hold(owner, [page])
        self.held[owner, page] += 1

    @precondition(lambda self: self.pages())
    @rule(data=st.data())
    def release(self, data):
        owner, page = data.draw(st.sampled_from(sorted(key for key, count in self.held.items() if count)))
        self.pool.release(owner, [page])
        self.held[owner, page] -= 1

    @rule(owner=OWNERS, page=st.integers(1, 7))
    def release_what_is_not_held(self, owner, page):
        if not self.held[owner, page]:
            with pytest.raises(AssertionError):
                self.pool.release(owner, [page])

    @rule(page=st.integers(1, 7))
    def hold_what_is_free(self, page):
        if page not in self.pages():
            with pytest.raises(AssertionError):
                self.pool.hold("a", [page])

    @invariant()
    def same_numbers(self):
        stats = self.pool.stats()
        per_page = Counter()
        for (_, page), count in self.held.items():
            per_page[page] += count
        assert stats.free == 7 - len(self.pages()) == self.pool.free
        assert stats.shared == sum(count > 1 for count in per_page.values())
        assert self.pool.sole(range(1, 8)) == sum(count == 1 for count in per_page.values())
        for owner in "abc":
            holds = sum(count for (name, _), count in self.held.items() if name == owner)
            assert self.pool.held_by(owner) == holds
            assert (owner in self.pool.owners()) == (holds > 0)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


def test_bounds():
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(0)
    with pytest.raises(AssertionError):
        PagePool(2).allocate("a", 3)
