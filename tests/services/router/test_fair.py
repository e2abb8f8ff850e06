"""The fair order: against a plain reference, and what it promises to tenants."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from penstock.router.fair import Entry, FairQueue


class Plain:
    """The same order, found by looking at everybody each time, with tags of the paper: start and finish per request."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, float, int, float]] = []
        self.tags: dict[str, float] = {}
        self.time = 0.0

    def push(self, tenant: str, rank: float, number: int, cost: float) -> None:
        if all(other[0] != tenant for other in self.waiting):
            self.tags[tenant] = max(self.time, self.tags.get(tenant, 0.0))
        self.waiting.append((tenant, rank, number, cost))

    def serve(self, weights: dict[str, float]) -> int:
        first = {tenant: min(one[1:] for one in self.waiting if one[0] == tenant) for tenant, *_ in self.waiting}
        tenant = min(first, key=lambda name: (self.tags[name], first[name][1]))
        rank, number, cost = first[tenant]
        self.waiting.remove((tenant, rank, number, cost))
        self.time = max(self.time, self.tags[tenant])
        self.tags[tenant] += cost / weights[tenant]
        if not self.waiting:
            self.time, self.tags = 0.0, {}
        return number


@pytest.mark.parametrize("seed", range(20))
def test_it_serves_as_the_plain_one(seed: int) -> None:
    random = Random(seed)
    queue: FairQueue[int] = FairQueue()
    plain = Plain()
    weights = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 1.0}
    for number in range(1, 400):
        if random.random() < 0.6:
            tenant, rank, cost = random.choice("abcd"), float(random.randrange(5)), float(random.randrange(1, 900))
            queue.push(number, tenant, rank=rank, cost=cost, weight=weights[tenant])
            plain.push(tenant, rank, number, cost)
        elif len(queue):
            order = [entry.item for entry in queue.order()]
            first = next(queue.order())
            queue.serve(first, first.cost)
            assert plain.serve(weights) == first.item == order[0]
    for item in [entry.item for entry in queue.order()]:
        first = next(queue.order())
        queue.serve(first, first.cost)
        assert first.item == item == plain.serve(weights), "the order told ahead is the one that follows"
    assert not len(queue)


def test_a_flood_of_ten_to_one_leaves_the_other_its_share() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(1000):
        queue.push(f"flood-{number}", "flood", rank=number, cost=100)
    first = [entry.tenant for entry, _ in zip(queue.order(), range(20), strict=False)]
    assert set(first) == {"flood"}
    for _ in range(20):
        queue.serve(next(queue.order()), 100)
    for number in range(100):
        queue.push(f"quiet-{number}", "quiet", rank=number, cost=100)
    served: Counter[str] = Counter()
    behind = 0
    for _ in range(200):
        entry = next(queue.order())
        queue.serve(entry, 100)
        served[entry.tenant] += 1
        behind = max(behind, served["flood"] - served["quiet"])
    assert behind <= 1, "never further behind than one request of the other"


def test_weights_and_costs_count_not_the_number_of_requests() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(400):
        queue.push(number, "long", rank=number, cost=1000)
        queue.push(number, "short", rank=number, cost=100)
        queue.push(number, "double", rank=number, cost=100, weight=2.0)
    tokens: Counter[str] = Counter()
    while sum(tokens.values()) < 40_000:
        entry = next(queue.order())
        queue.serve(entry, entry.cost)
        tokens[entry.tenant] += int(entry.cost)
    assert tokens["long"] == pytest.approx(10_000, abs=1000)
    assert tokens["short"] == pytest.approx(10_000, abs=1000)
    assert tokens["double"] == pytest.approx(20_000, abs=1000)


def test_who_had_nothing_waiting_has_saved_up_nothing() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(100):
        queue.push(number, "busy", rank=number, cost=10)
    for _ in range(50):
        queue.serve(next(queue.order()), 10)
    for number in range(100):
        queue.push(number, "late", rank=number, cost=10)
    turns = [entry.tenant for entry, _ in zip(queue.order(), range(20), strict=False)]
    assert Counter(turns) == {"busy": 10, "late": 10}


def test_what_it_really_costs_is_charged() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(30):
        queue.push(number, "cached", rank=number, cost=1000)
        queue.push(number, "plain", rank=number, cost=1000)
    served: Counter[str] = Counter()
    for _ in range(22):
        entry = next(queue.order())
        queue.serve(entry, 100 if entry.tenant == "cached" else 1000)
        served[entry.tenant] += 1
    assert served == {"cached": 20, "plain": 2}


def test_a_rank_moves_a_request_within_its_tenant_only() -> None:
    queue: FairQueue[str] = FairQueue()
    for name, tenant, rank in (("a1", "a", 1), ("b2", "b", 2), ("b0", "b", -1000), ("a3", "a", 3)):
        queue.push(name, tenant, rank=rank, cost=5)
    assert [entry.item for entry in queue.order()] == ["a1", "b0", "b2", "a3"]


def test_who_leaves_is_gone_and_an_empty_line_forgets() -> None:
    queue: FairQueue[int] = FairQueue()
    entries: list[Entry[int]] = [queue.push(number, "a", rank=number, cost=10) for number in range(3)]
    queue.remove(entries[1])
    assert [entry.item for entry in queue.order()] == [0, 2]
    queue.serve(entries[0], 1e9)
    queue.remove(entries[2])
    assert len(queue) == 0 == queue.waiting("a")
    queue.push(1, "a", rank=0, cost=1)
    queue.push(2, "b", rank=1, cost=1)
    assert [entry.item for entry in queue.order()] == [1, 2], "an old debt counts no more"


def test_what_is_ahead_is_bounded_by_shares() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(1000):
        queue.push(number, "flood", rank=number, cost=100)
    assert queue.ahead("flood", 1e9) == pytest.approx(100_000)
    assert queue.ahead("quiet", 1e9) <= 100
    for number in range(10):
        queue.push(number, "quiet", rank=number, cost=100)
    assert queue.ahead("quiet", 1e9) == pytest.approx(2000, abs=200)


def test_the_one_to_do_without_is_of_whoever_has_most_waiting() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(6):
        queue.push(number, "some", rank=number, cost=1)
        queue.push(10 + number, "paid", rank=number, cost=1, weight=4.0)
    queue.push(99, "few", rank=0, cost=10_000)
    assert queue.surplus().item == 5


def test_memory_is_bounded_by_what_waits() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.push(0, "stays", rank=0, cost=1)
    for number in range(5000):
        queue.serve(queue.push(number, f"tenant-{number}", rank=0, cost=1e6), 1e6)
    assert len(queue._finished) <= 1024
