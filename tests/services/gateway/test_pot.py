"""What tenants share: nothing is kept from one who is alone, and others find room when they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.accounts.pot import TenantPot

pytestmark = pytest.mark.attack


def fill(pot: TenantPot, tenant: str) -> int:
    """How many it gets."""
    count = 0
    while pot.take(tenant):
        count += 1
    return count


def test_one_tenant_alone_may_have_all() -> None:
    pot = TenantPot(16, several=False)
    assert (fill(pot, "a"), pot.used) == (16, 16)


def test_a_flood_leaves_room_for_whoever_comes() -> None:
    pot = TenantPot(256, several=True)
    assert fill(pot, "a") == 224
    assert fill(pot, "b") == 32
    pot.give_back("a", 100)
    assert fill(pot, "a") == 4, "up to its half, and no more"
    assert fill(pot, "b") == 96
    assert (pot.used, fill(pot, "c")) == (256, 0)


def test_shares_are_weighted() -> None:
    pot = TenantPot(100, several=True, weight={"a": 3.0, "b": 1.0}.__getitem__)
    assert pot.take("b")
    assert (fill(pot, "a"), fill(pot, "b")) == (75, 24)


def test_as_long_as_half_is_free_nobody_is_held_back() -> None:
    pot = TenantPot(100, several=True)
    assert all(pot.take(tenant) for tenant in ("b", "c", "d", "e"))
    assert sum(pot.take("a") for _ in range(46)) == 46
    assert not pot.take("a") and pot.take("b")


def test_large_pieces_are_counted_whole() -> None:
    pot = TenantPot(100, several=True)
    assert pot.take("a", 88) and not pot.take("a", 1)
    assert pot.take("b", 12) and not pot.take("c", 1)
    pot.give_back("a", 88)
    assert pot.used == 12 and pot.take("c", 50)


@given(
    most=st.integers(1, 60),
    weights=st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 2.0]), min_size=4, max_size=4),
    steps=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-8, 8).filter(bool)), max_size=80),
)
def test_as_a_naive_count_has_it(most: int, weights: Mapping[str, float], steps: list[tuple[str, int]]) -> None:
    pot, held = TenantPot(most, several=True, weight=weights.__getitem__), Counter[str]()
    for tenant, amount in steps:
        if amount < 0:
            if (amount := min(-amount, held[tenant])) > 0:
                pot.give_back(tenant, amount)
                held[tenant] -= amount
        else:
            others = [one for one in held if held[one] and one != tenant]
            parts = weights[tenant] / (weights[tenant] + sum(weights[one] for one in others))
            share = max(1, int(most * parts)) if others else most - most // 8
            total = sum(held.values()) + amount
            may = total <= most and (total <= most // 2 or held[tenant] + amount <= share)
            assert pot.take(tenant, amount) is may
            held[tenant] += amount * may
        assert pot.used == sum(held.values())
