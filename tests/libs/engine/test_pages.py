"""The page pool against a dictionary, and the bugs it must not let pass."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.engine.pages import TAIL_SHARE, PagePool
from penstock.kv.identity import packed
from penstock.kv.parts import far_key

OWNERS = st.sampled_from(["a", "b", "c"])
NAMES = [b"x", b"xx", b"xy", b"xxx", b"xxy", b"y", b"yx", b"yy"]
"""Each block follows that of the key without its last letter; the first letter is the tenant's."""
KEYS = st.sampled_from(NAMES)
PARENTS = st.sampled_from([b"", b"x"])
TOKENS = st.lists(st.sampled_from([0, 1, 256, 65536]), min_size=1, max_size=3).map(tuple)
TOTAL = 7


def common(one, other):
    """Leading tokens in common."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class PoolMachine(RuleBasedStateMachine):
    """`held` is the naive pool: (owner, page) -> holds; `named` are its names: key -> page; `rows` what others may
    copy: page -> (key of the block before, tokens); `tails` the pages with rows and no name that nobody holds; `chosen`
    the idle blocks that leave next; `most` is how many others were idle at a time."""

    most_idle = None
    tenant_share = 1.0

    def __init__(self):
        super().__init__()
        self.ticks = itertools.count()
        bounds = {"most_idle": self.most_idle, "tenant_share": self.tenant_share}
        self.pool = PagePool(TOTAL, lambda: float(next(self.ticks)), **bounds)
        self.held = Counter()
        self.named, self.rows, self.tails = {}, {}, []
        self.chosen, self.most = [], 0

    def pages(self):
        return {page for (_, page), count in self.held.items() if count}

    def idle(self):
        return {key for key, page in self.named.items() if page not in self.pages()}

    def counted(self):
        """Idle blocks that are not chosen, by tenant."""
        return Counter(key[:1] for key in self.idle() - set(self.chosen))

    def settle(self):
        """What is chosen stays so while it is idle, and nothing idle follows that is not chosen."""
        before = None
        while before != self.chosen:
            before, others = self.chosen, self.idle() - set(self.chosen)
            followed = {key[:-1] for key in others}
            self.chosen = [key for key in before if key in self.idle() and key not in followed]
        self.most = max(self.most, self.counted().total())

    def may_go(self, counted, gone):
        """Whether so many blocks of each tenant may go: only of tenants over their share, while there are any."""
        over = [tenant for tenant, count in counted.items() if count > self.tenant_share * self.most]
        return not gone or any(
            self.may_go(counted - Counter([tenant]), gone - Counter([tenant]))
            for tenant in over or counted
            if gone[tenant]
        )

    def leave(self, gone):
        """These idle blocks have left: first those that were chosen."""
        first = set(self.chosen[: len(gone)])
        assert first <= gone
        assert self.may_go(self.counted(), Counter(key[:1] for key in gone - first))
        for key in gone:
            del self.named[key]
        self.settle()

    @rule(owner=OWNERS, count=st.integers(0, 9))
    def allocate(self, owner, count):
        assert self.pool.can_allocate(count) == (count <= TOTAL - len(self.pages()))
        if not self.pool.can_allocate(count):
            return
        nameless, idle = TOTAL - len(self.pages()) - len(self.idle()), self.idle()
        kept = max(0, min(len(self.tails), nameless - count))
        pages = self.pool.allocate(owner, count)
        assert set(self.tails) - set(pages) == set(self.tails[len(self.tails) - kept :]), "the older ones go first"
        self.tails = self.tails[len(self.tails) - kept :]
        assert len(set(pages)) == count and not set(pages) & self.pages()
        assert all(1 <= page <= TOTAL for page in pages)
        gone = {key for key in idle if self.named[key] in pages}
        assert len(gone) == max(0, count - nameless), "pages without a key go first"
        self.rows = {page: rows for page, rows in self.rows.items() if page not in pages}
        assert not any(key[:-1] in gone for key in idle - gone), "none goes before the idle ones behind it"
        self.leave(gone)
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
            page_there = self.pool.name(page, key, key[:-1], len(key), namespace=key[:1])
            assert page_there == self.named.setdefault(key, page)

    @precondition(lambda self: self.named)
    @rule(owner=OWNERS, data=st.data())
    def share(self, owner, data):
        page = self.named[data.draw(st.sampled_from(sorted(self.named)))]
        self.pool.share(owner, [page])
        self.held[owner, page] += 1
        self.settle()

    @rule(count=st.integers(0, 4))
    def choose(self, count):
        found, before = self.pool.choose(count), len(self.chosen)
        assert found[:before] == self.chosen[:count]
        for key in found[before:]:
            others = self.idle() - set(self.chosen)
            assert key in others and not any(other[:-1] == key for other in others)
            assert self.may_go(self.counted(), Counter([key[:1]]))
            self.chosen.append(key)
        assert len(self.chosen) == self.pool.chosen == max(before, min(count, len(self.idle())))

    @precondition(lambda self: self.pages())
    @rule(parent=PARENTS, tokens=TOKENS, data=st.data())
    def say_rows(self, parent, tokens, data):
        page = data.draw(st.sampled_from(sorted(self.pages())))
        self.pool.rows(page, parent, packed(tokens))
        self.rows[page] = parent, tokens

    @rule(owner=OWNERS, parent=PARENTS, tokens=TOKENS, borrowed=st.booleans())
    def longest(self, owner, parent, tokens, borrowed):
        page, count = self.pool.longest(parent, packed(tokens))
        found = [common(theirs, tokens) for before, theirs in self.rows.values() if before == parent]
        assert count == max(found, default=0)
        assert (common(self.rows[page][1], tokens) == count and self.rows[page][0] == parent) if count else page == 0
        if count and borrowed:
            self.pool.borrow(owner, page)
            self.held[owner, page] += 1
            self.tails = [tail for tail in self.tails if tail != page]
            self.settle()

    @rule(page=st.integers(1, TOTAL))
    def forget(self, page):
        self.pool.forget([page])
        self.rows.pop(page, None)
        self.tails = [tail for tail in self.tails if tail != page]
        self.named = {key: other for key, other in self.named.items() if other != page}
        self.settle()

    @precondition(lambda self: self.pages())
    @rule(data=st.data())
    def release(self, data):
        owner, page = data.draw(st.sampled_from(sorted(key for key, count in self.held.items() if count)))
        self.pool.release(owner, [page])
        self.held[owner, page] -= 1
        if page not in self.pages() and page not in self.named.values() and page in self.rows:
            self._rest(page)
        self.settle()
        self._let_go()

    def _rest(self, page):
        """A tail is kept unless its rows are in another page too, and there are not more of them than may be."""
        parent, tokens = self.rows[page]
        others = [rows for other, rows in self.rows.items() if other != page]
        if not any(before == parent and theirs[: len(tokens)] == tokens for before, theirs in others):
            self.tails.append(page)
        else:
            del self.rows[page]
        most = -(-(TOTAL if self.most_idle is None else self.most_idle) // TAIL_SHARE)
        for gone in self.tails[: max(0, len(self.tails) - most)]:
            self.tails.remove(gone)
            del self.rows[gone]

    def _let_go(self):
        """Of the idle pages that are too many the pool has taken the names, those of the ends of chains first."""
        idle, most = self.idle(), TOTAL if self.most_idle is None else self.most_idle
        gone = {key for key in idle if self.pool.find(key) is None}
        assert len(gone) == max(0, len(idle) - most)
        assert not any(key[:-1] in gone for key in idle - gone), "none goes before the idle ones behind it"
        for key in gone:
            self.rows.pop(self.named[key], None)
        self.leave(gone)

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
            with pytest.raises(AssertionError):
                self.pool.rows(page, b"", packed((1,)))

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
    def same_tails(self):
        assert list(self.pool._tails) == self.tails
        rows = {page: (parent, packed(tokens), b"") for page, (parent, tokens) in self.rows.items()}
        assert self.pool._beginnings._rows == rows
        assert self.pool.unnamed == TOTAL - len(self.pages()) - len(self.idle())

    @invariant()
    def same_names(self):
        assert self.pool.stats().resident == len(self.named)
        assert self.pool.chosen == len(self.chosen)
        for key in NAMES:
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


class FairMachine(PoolMachine):
    """As that, of a pool in which a tenant's share of the idle pages is bounded."""

    most_idle = 5
    tenant_share = 0.4


TestFairPool = FairMachine.TestCase
TestFairPool.settings = settings(max_examples=60, stateful_step_count=40)


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


@pytest.mark.parametrize(("share", "kept"), [(1.0, 0), (0.25, 5)])
def test_a_flood_of_one_tenant_takes_no_more_than_its_share_from_another(share, kept):
    """Whose blocks have been there for longest, and leave first where there is no bound."""
    pool = PagePool(20, lambda: 0.0, tenant_share=share)
    for number in range(65):
        [page] = pool.allocate("a", 1)
        pool.name(page, b"%d" % number, b"", 0, namespace=b"quiet" if number < 5 else b"loud")
        pool.release("a", [page])
    assert sum(pool.find(b"%d" % number) is not None for number in range(5)) == kept
    assert pool.find(b"64") is not None


def test_pages_of_a_tenant_that_are_used_do_not_count():
    """It has many, but of those that nobody uses no more than another."""
    pool = PagePool(20, lambda: 0.0, tenant_share=0.5)
    for tenant, held in ((b"old", 0), (b"busy", 12)):
        pages = pool.allocate("a", 4 + held)
        for page in pages:
            pool.name(page, b"%s %d" % (tenant, page), b"", 0, namespace=tenant)
        pool.release("a", pages[:4])
    pool.allocate("b", 1)
    kept = [key for key in sorted(pool.keys()) if key.startswith(b"old")]
    assert len(kept) == 3


def tail(pool, number, parent=b"root"):
    """The page of a tail that nobody holds."""
    [page] = pool.allocate("tail", 1)
    pool.rows(page, parent, packed((number,)))
    pool.release("tail", [page])
    return page


def blocks(pool, count):
    """So many blocks that nobody holds, none behind another."""
    pages = pool.allocate("blocks", count)
    for page in pages:
        pool.name(page, b"%d" % page, b"", 0)
    pool.release("blocks", pages)


def test_a_tail_never_keeps_a_page_from_being_allocated():
    pool = PagePool(TAIL_SHARE * 3)
    for number in range(3):
        tail(pool, number)
    blocks(pool, pool.total - 3)
    assert (pool.stats().resident, pool.free) == (pool.total - 3, pool.total)
    assert len(pool.allocate("all", pool.total)) == pool.total
    assert pool.stats().resident == 0 and pool.longest(b"root", packed((2,))) == (0, 0)


def test_tails_beyond_their_share_leave_before_any_block_and_the_oldest_first():
    """Of what nobody uses so many may be tails, the same share of what is left when blocks leave."""
    pool = PagePool(TAIL_SHARE * 4)
    tails = [tail(pool, number) for number in range(5)]
    assert pool.longest(b"root", packed((0,))) == (0, 0), "as many as there may be in all are kept"
    blocks(pool, TAIL_SHARE * 4 - 4)
    there = [pool.longest(b"root", packed((number,)))[0] for number in range(5)]
    assert there == [0, *tails[1:]] and pool.unnamed == 1
    assert pool.allocate("a", 1) == [tails[1]], "three are the share of those blocks"
    pool.allocate("a", TAIL_SHARE - 4)
    assert pool.unnamed == 0 and len(pool._tails) == 3, "then the blocks worth least go"
    pool.allocate("a", 2)
    assert pool.unnamed == 0 and len(pool._tails) == 2


def test_what_was_copied_from_is_kept_for_longer():
    pool = PagePool(TAIL_SHARE * 2)
    tails = [tail(pool, number) for number in range(2)]
    pool.borrow("a", tails[0])
    assert pool.free == pool.total - 1
    pool.release("a", [tails[0]])
    tail(pool, 2)
    assert [pool.longest(b"root", packed((number,)))[1] for number in range(3)] == [1, 0, 1]


def test_a_tail_that_another_page_has_too_is_not_kept():
    pool = PagePool(TAIL_SHARE * 8)
    short, equal, long = pool.allocate("a", 3)
    pool.rows(short, b"root", packed((1, 2)))
    pool.rows(equal, b"root", packed((1, 2, 3)))
    pool.rows(long, b"root", packed((1, 2, 3)))
    pool.release("a", [short, equal, long])
    assert list(pool._tails) == [long]


def test_bounds():
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(0)
    with pytest.raises(AssertionError):
        PagePool(2).allocate("a", 3)


def test_what_is_dropped_is_found_no_more_and_holds_stay():
    """Pages of one root: idle ones are free at once, held ones when they are released; those of others stay."""
    pool, tokens = PagePool(TOTAL), packed([1, 2])
    mine, theirs = pool.allocate("a", 4), pool.allocate("b", 2)
    for page, key, parent in zip(mine, (b"m1", b"m2", b"m3"), (b"m", b"m1", b"m2"), strict=False):
        pool.name(page, key, parent, 0, namespace=b"m")
    pool.rows(mine[3], b"m3", tokens, namespace=b"m")
    pool.name(theirs[0], b"t1", b"t", 0, namespace=b"t")
    pool.rows(theirs[1], b"t1", tokens, namespace=b"t")
    pool.release("a", mine[1:])
    pool.release("b", theirs)
    forgotten = []

    class Watcher:
        def block_named(self, key): ...

        def block_forgotten(self, key):
            forgotten.append(key)

    pool.watch(Watcher())
    assert pool.drop({b"m"}) == (3, 1)
    assert sorted(forgotten) == [b"m1", b"m2", b"m3"]
    assert [pool.find(key) for key in (b"m1", b"m2", b"m3", b"t1")] == [None, None, None, theirs[0]]
    assert pool.longest(b"m3", tokens) == (0, 0) and pool.longest(b"t1", tokens) == (theirs[1], 2)
    assert pool.holds(mine[0]) == 1 and pool.free == TOTAL - 1
    pool.release("a", mine[:1])
    assert pool.free == TOTAL and sorted(pool.allocate("c", TOTAL)) == list(range(1, TOTAL + 1))


def test_a_tail_that_has_outlived_its_block_is_dropped_with_its_tenant():
    pool, tokens = PagePool(40), packed([1, 2])
    block, tail, *others = pool.allocate("a", 22)
    pool.name(block, b"k1", b"m", 0, namespace=b"m")
    pool.rows(tail, b"k1", tokens, namespace=b"m")
    for number, page in enumerate(others):
        pool.name(page, b"t%d" % number, b"t", 0, namespace=b"t")
    pool.release("a", [block, tail, *others])
    pool.release("b", pool.allocate("b", 19))
    assert pool.find(b"k1") is None and pool.longest(b"k1", tokens) == (tail, 2)
    assert pool.drop({b"m"}) == (0, 0)
    assert pool.longest(b"k1", tokens) == (0, 0)
    assert sorted(pool.allocate("c", 40)) == list(range(1, 41))


def test_a_page_with_a_far_part_alone_is_never_found_as_a_block():
    pool, key = PagePool(2), b"k" * 32
    [page] = pool.allocate("a", 1)
    pool.note_parts([page], [True])
    with pytest.raises(AssertionError, match="another part"):
        pool.name(page, key, b"", 0)
    assert pool.name(page, far_key(key), b"", 0) == page
    assert (pool.find(key), pool.find(far_key(key)), pool.far(page)) == (None, page, True)
    pool.release("a", [page])
    pages = pool.allocate("b", 2)
    assert page in pages and not pool.far(page), "it is somebody else's"
    with pytest.raises(AssertionError, match="another part"):
        pool.name(page, far_key(key), b"", 0)
