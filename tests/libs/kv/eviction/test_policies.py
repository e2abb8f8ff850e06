"""Each policy against a twin that scans everything on offer."""

from __future__ import annotations

import heapq
import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.libs.kv.eviction.helpers import Item, key

from penstock.kv.cost import PrefillCost
from penstock.kv.eviction import POLICIES, SEVERAL, EvictionPolicy, Lru, S3Fifo, Worth, make_policy, worth
from penstock.kv.eviction.reuse import BUCKETS, EDGES, bucket
from penstock.kv.hint import ReturnHint

NUMBERS = st.integers(0, 9)
OWNERS = ["", "a", "b", SEVERAL]


class PolicyMachine(RuleBasedStateMachine):
    """What a table does to a policy, in any order. Subclasses say which victims are right."""

    policy: EvictionPolicy[Item]

    def __init__(self) -> None:
        super().__init__()
        self.now, self.tick = 100.0, 0
        self.items: dict[int, Item] = {}
        self.offered: list[Item] = []

    def begin(self) -> None:
        self.tick += 1

    @rule(seconds=st.sampled_from([0.01, 0.5, 3.0, 40.0, 900.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(number=NUMBERS, tokens=st.sampled_from([0, 512, 30_000, 100_000]), owner=st.sampled_from(OWNERS))
    def store(self, number: int, tokens: int, owner: str) -> None:
        if number in self.items:
            return
        self.tick += 1
        item = Item(key(number), tokens, self.tick, used_at=self.now, turn=number % 3, session=owner)
        self.items[number] = item
        self.policy.block_stored(item)
        self.heard_stored(item)
        self.offer(number)

    @rule(number=NUMBERS, apart=st.booleans())
    def use(self, number: int, apart: bool) -> None:
        item = self.items.get(number)
        if item is None:
            return
        self.tick += 1
        item.used, item.used_at, item.uses = self.tick, self.now, item.uses + apart
        self.policy.block_used(item)
        self.heard_used(item)
        if item in self.offered:
            self.offer(number)

    @rule(number=NUMBERS)
    def offer(self, number: int) -> None:
        item = self.items.get(number)
        if item is not None:
            self.policy.offer_block(item)
            if item not in self.offered:
                self.offered.append(item)

    @rule(number=NUMBERS)
    def withdraw(self, number: int) -> None:
        item = self.items.get(number)
        if item is not None:
            self.policy.withdraw_block(item)
            if item in self.offered:
                self.offered.remove(item)

    @rule(number=NUMBERS)
    def remove(self, number: int) -> None:
        item = self.items.pop(number, None)
        if item is not None:
            self.policy.withdraw_block(item)
            if item in self.offered:
                self.offered.remove(item)
            self.policy.block_removed(item)
            self.heard_removed(item)

    @rule()
    def victim(self) -> None:
        found = self.policy.next_victim()
        assert (found is None) == (not self.offered)
        if found is not None:
            self.check(found)
            self.offered.remove(found)
            del self.items[int.from_bytes(found.key, "big")]
            self.policy.block_removed(found)
            self.heard_removed(found)

    @invariant()
    def counted(self) -> None:
        assert len(self.policy) == len(self.offered)

    def teardown(self) -> None:
        while self.offered:
            self.victim()
        assert self.policy.next_victim() is None

    def heard_stored(self, item: Item) -> None: ...

    def heard_used(self, item: Item) -> None: ...

    def heard_removed(self, item: Item) -> None: ...

    def check(self, found: Item) -> None:
        raise AssertionError("every policy has its own")


class LruMachine(PolicyMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy = Lru()

    def check(self, found: Item) -> None:
        assert found.used == min(item.used for item in self.offered)


class S3FifoMachine(PolicyMachine):
    """The paper's queues as lists of all stored blocks; those that may not go are passed over."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = S3Fifo()
        self.small: list[Item] = []
        self.main: list[Item] = []
        self.ghosts: list[bytes] = []
        self.frequency: dict[bytes, int] = {}
        self.uses: dict[bytes, int] = {}

    def heard_stored(self, item: Item) -> None:
        (self.main if item.key in self.ghosts else self.small).append(item)
        self.ghosts = [one for one in self.ghosts if one != item.key]
        self.frequency[item.key], self.uses[item.key] = 0, item.uses

    def heard_used(self, item: Item) -> None:
        if item.uses > self.uses[item.key]:
            self.frequency[item.key] = min(3, self.frequency[item.key] + 1)
            self.uses[item.key] = item.uses

    def heard_removed(self, item: Item) -> None:
        for queue in (self.small, self.main):
            if item in queue:
                queue.remove(item)

    def check(self, found: Item) -> None:
        assert found is self.expected()

    def expected(self) -> Item:
        while True:
            small = [item for item in self.small if item in self.offered]
            main = [item for item in self.main if item in self.offered]
            if small and (not main or len(self.small) > 0.1 * len(self.small + self.main)):
                item = small[0]
                if self.frequency[item.key] > 1:
                    self.frequency[item.key] = 0
                    self.small.remove(item)
                    self.main.append(item)
                    continue
                self.ghosts.append(item.key)
                while len(self.ghosts) > 0.9 * len(self.small + self.main):
                    self.ghosts.pop(0)
                return item
            item = main[0]
            if not self.frequency[item.key]:
                return item
            self.frequency[item.key] -= 1
            self.main.remove(item)
            self.main.append(item)


class WorthMachine(PolicyMachine):
    """Worth by its definition, for every block on offer.

    Blocks move between shelves a little late: by a quarter of their bucket. So the victim must be worth no more than
    any other, each at some time within that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.policy = self.worth = Worth(lambda: self.now)
        self.outlooks: dict[str, ReturnHint] = {}

    @rule()
    def learn(self) -> None:
        self.worth._learn(self.now)

    @rule(owner=st.sampled_from(OWNERS[1:3]), ended=st.booleans(), after=st.sampled_from([None, 0.5, 20.0, 500.0]))
    def expect(self, owner: str, ended: bool, after: float | None) -> None:
        returns_at = None if after is None else self.now + after
        self.outlooks[owner] = outlook = ReturnHint(ended, returns_at)
        self.policy.expect_session(owner, outlook)

    def check(self, found: Item) -> None:
        most = self.range_of(found)[0]
        for item in self.offered:
            assert most <= self.range_of(item)[1] * (1 + 1e-9), (found, item)

    def range_of(self, item: Item) -> tuple[float, float]:
        steps = [self.worth_at(item, self.now - late) for late in self.lateness(item)]
        return min(steps), max(steps)

    def lateness(self, item: Item) -> list[float]:
        age = self.now - item.used_at
        outlook = self.outlooks.get(item.session, ReturnHint())
        if outlook.returns_at is not None and not outlook.ended:
            age = max(age, abs(outlook.returns_at - self.now) * 2)
        most = (EDGES[min(bucket(age) + 1, BUCKETS - 1)] - EDGES[bucket(age)]) / 4
        return [most * step / 16 for step in range(17)]

    def worth_at(self, item: Item, now: float) -> float:
        cost = 2.0 ** (round(2 * math.log2(item.seconds or PrefillCost().seconds(item.first_token, 1))) / 2)
        outlook = self.outlooks.get(item.session, ReturnHint())
        group = 3 + min(item.uses, 5) if item.uses else min(item.turn, 3)
        if outlook.returns_at is not None and not outlook.ended:
            whole = max(0.0, outlook.returns_at - item.used_at)
            if now - outlook.returns_at < whole:
                return cost * 0.8 / EDGES[bucket(max(outlook.returns_at - now, whole / 2)) + 1]
        rate = self.worth._rates[group][bucket(now - item.used_at)]
        return cost * rate / (64 if outlook.ended else 1)


for machine in (LruMachine, S3FifoMachine, WorthMachine):
    machine.TestCase.settings = settings(max_examples=80, stateful_step_count=50)
TestLru = LruMachine.TestCase
TestS3Fifo = S3FifoMachine.TestCase
TestWorth = WorthMachine.TestCase


def test_a_policy_is_made_by_its_name() -> None:
    assert [type(make_policy(name, lambda: 0.0)) for name in POLICIES] == [Worth, S3Fifo, Lru]
    with pytest.raises(ValueError, match="'fifo' is unknown: one of worth, s3-fifo, lru"):
        make_policy("fifo", lambda: 0.0)


def test_a_session_that_ended_goes_first_and_one_that_is_due_goes_last() -> None:
    policy: Worth[Item] = Worth(lambda: 10.0)
    items = [Item(key(at), used_at=float(at), session=owner) for at, owner in enumerate(("due", "", "over"))]
    for item in items:
        policy.block_stored(item)
        policy.offer_block(item)
    policy.expect_session("over", ReturnHint(ended=True))
    policy.expect_session("due", ReturnHint(returns_at=11.0))
    assert [policy.next_victim() for _ in items] == [items[2], items[1], items[0]]


def test_the_dearer_of_two_goes_later_and_a_measured_cost_counts() -> None:
    policy: Worth[Item] = Worth(lambda: 1.0)
    far, near, slow = Item(key(1), 90_000), Item(key(2)), Item(key(3), seconds=9.0)
    for item in (far, near, slow):
        policy.offer_block(item)
    assert [policy.next_victim() for _ in range(3)] == [near, far, slow]


@pytest.mark.parametrize("name", POLICIES)
def test_a_victim_costs_the_same_however_many_are_on_offer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts heap operations, and in each the comparisons are logarithmic."""
    touched = 0

    def counting(heap: list, *entry: object):
        nonlocal touched
        touched += 1
        return original(heap, *entry)

    counts = []
    for many in (200, 20_000):
        policy = make_policy(name, lambda: 1000.0)
        for at in range(many):
            item = Item(key(at), (at % 200) * 512, at, used_at=at / 50)
            policy.block_stored(item)
            policy.offer_block(item)
        policy.next_victim()  # brings all shelves up to date
        touched, original = 0, heapq.heappop
        monkeypatch.setattr(heapq, "heappop", counting)
        for _ in range(100):
            policy.next_victim()
        monkeypatch.undo()
        counts.append(touched)
    assert counts[1] <= 2 * counts[0] + 100


def test_what_was_evicted_is_remembered_when_it_comes_back() -> None:
    policy: Worth[Item] = Worth(lambda: 5.0)
    item = Item(key(1), uses=2)
    policy.block_stored(item)
    policy.block_removed(item)
    again = Item(key(1))
    policy.block_stored(again)
    assert again.uses == 3


def test_a_block_that_moves_between_tiers_is_not_counted_anew_each_time() -> None:
    """It comes back from the other tier with the uses that it had when it left."""
    policy: Worth[Item] = Worth(lambda: 5.0)
    item = Item(key(1), uses=2)
    for move in range(40):
        policy.block_stored(item)
        assert item.uses == 2 + move
        policy.block_removed(item)
        item = Item(key(1), uses=item.uses)


def test_a_policy_remembers_a_bounded_number_of_keys_and_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "_REMEMBERED", 10)
    policy: Worth[Item] = Worth(lambda: 5.0)
    for at in range(100):
        item = Item(key(at), session=str(at))
        policy.block_stored(item)
        policy.offer_block(item)
        policy.withdraw_block(item)
        policy.block_removed(item)
        policy.expect_session(str(at), ReturnHint(ended=True))
    assert (len(policy._gone), len(policy._outlooks), len(policy._owned)) == (10, 10, 0)
