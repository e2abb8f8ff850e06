"""What the router hears of the blocks in a worker's own pages."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.engine.pages import PagePool
from penstock.kv.parts import far_key
from penstock.worker.resident import ResidentBlocks

TOTAL = 6
KEYS = [b"x", b"xx", b"xy", b"xxx", b"xxy", b"y", b"yy", b"yx"]
PENDING = 3


class Follower:
    """Makes of the messages what the router does."""

    def __init__(self, blocks: ResidentBlocks) -> None:
        self.following = blocks.followed()
        self.news = self.following.__enter__()
        self.known: set[bytes] = set()
        self.snapshots = 0

    def listen(self) -> None:
        while (events := self.news.take()) is not None:
            if events.snapshot:
                self.snapshots += 1
                self.known.clear()
            self.known.update(events.stored)
            self.known.difference_update(events.removed)


class Machine(RuleBasedStateMachine):
    """Pages get blocks and lose them; whoever listens knows them, how ever late it does."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(TOTAL)
        self.blocks = ResidentBlocks(self.pool, pending=PENDING)
        self.followers: list[Follower] = []

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4))
    def name(self, keys: list[bytes]) -> None:
        for key in keys:
            [page] = self.pool.allocate("a", 1)
            self.pool.name(page, key, key[:-1], len(key))
            self.pool.release("a", [page])

    @rule(page=st.integers(1, TOTAL))
    def forget(self, page: int) -> None:
        self.pool.forget([page])

    @rule()
    def follow(self) -> None:
        self.followers.append(Follower(self.blocks))

    @rule()
    def leave(self) -> None:
        for follower in self.followers[:1]:
            follower.following.__exit__(None, None, None)
        del self.followers[:1]

    @rule(pick=st.integers(0, 3))
    def listen(self, pick: int) -> None:
        for follower in self.followers[pick : pick + 1]:
            follower.listen()
            assert follower.known == set(self.pool.keys())
            assert follower.news.take() is None

    @invariant()
    def same(self) -> None:
        assert set(self.pool.keys()) == {key for key in KEYS if self.pool.find(key) is not None}

    def teardown(self) -> None:
        for follower in self.followers:
            follower.listen()
            assert follower.known == set(self.pool.keys())


TestResident = Machine.TestCase
TestResident.settings = settings(max_examples=60, stateful_step_count=40)


def test_who_is_late_is_told_all_anew_instead_of_everything_since() -> None:
    pool = PagePool(TOTAL)
    follower = Follower(ResidentBlocks(pool, pending=PENDING))
    follower.listen()
    pages = pool.allocate("a", TOTAL)
    for page, key in zip(pages, KEYS, strict=False):
        pool.name(page, key, key[:-1], len(key))
    follower.listen()
    assert (follower.known, follower.snapshots) == (set(KEYS[:TOTAL]), 2)
    pool.forget(pages[:1])
    follower.listen()
    assert (follower.known, follower.snapshots) == (set(KEYS[1:TOTAL]), 2)


def test_a_far_part_counts_as_the_block_until_both_are_gone() -> None:
    pool, key = PagePool(4), b"k" * 32
    blocks = ResidentBlocks(pool)
    follower = Follower(blocks)
    whole, far = pool.allocate("a", 2)
    pool.note_parts([far], [True])
    pool.name(far, far_key(key), b"", 0)
    pool.name(whole, key, b"", 0)
    late = Follower(blocks)
    steps: list[tuple[list[int], set[bytes]]] = [([], {key}), ([whole], {key}), ([far], set())]
    for pages, known in steps:
        pool.forget(pages)
        for one in (follower, late):
            one.listen()
            assert one.known == known
