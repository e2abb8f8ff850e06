"""Where keys are at home, and what a home remembers."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from tests.services.kvstore.helpers import keys

from penstock.kvstore.elsewhere.homes import Directory, by_home, home
from penstock.kvstore.elsewhere.neighbours import Shunned

STORES = [f"10.0.0.{number}:7000" for number in range(1, 8)]
MANY = keys(4000)
HOMES = [4, 4, 0, 1, 2, 5, 6, 0, 1, 4, 1, 0]


def test_everybody_finds_the_same_home() -> None:
    shuffled = list(STORES)
    for seed in range(5):
        random.Random(seed).shuffle(shuffled)
        assert [home(key, shuffled) for key in MANY[:200]] == [home(key, STORES) for key in MANY[:200]]
    # part of the agreement between stores of different releases
    assert [STORES.index(home(key, STORES)) for key in MANY[:12]] == HOMES


def test_homes_are_spread_evenly() -> None:
    counts = Counter(home(key, STORES) for key in MANY)
    assert set(counts) == set(STORES)
    fair = len(MANY) / len(STORES)
    assert all(0.8 * fair < count < 1.2 * fair for count in counts.values())


@pytest.mark.parametrize("index", range(len(STORES)))
def test_only_the_keys_of_the_one_that_leaves_move(index: int) -> None:
    left = [store for store in STORES if store != STORES[index]]
    for key in MANY:
        before, after = home(key, STORES), home(key, left)
        assert before == after or before == STORES[index]


def test_no_home_without_stores() -> None:
    with pytest.raises(ValueError):
        home(MANY[0], [])


def test_keys_are_grouped_by_home() -> None:
    groups = by_home(MANY, STORES)
    assert sorted(key for group in groups.values() for key in group) == sorted(MANY)
    assert all(home(key, STORES) == where for where, group in groups.items() for key in group)


def test_a_directory_names_the_latest_holder_first() -> None:
    directory = Directory(100)
    for store in STORES:
        directory.stored(store, MANY[:2])
    assert directory.holders(MANY[0], STORES) == STORES[:2:-1], "four of them"
    directory.stored(STORES[4], MANY[:1])
    assert directory.holders(MANY[0], STORES)[0] == STORES[4]
    directory.removed(STORES[4], MANY[:1])
    assert STORES[4] not in directory.holders(MANY[0], STORES)
    assert directory.holders(MANY[1], {STORES[6]}) == [STORES[6]], "those who left are not named"
    for store in STORES:
        directory.removed(store, MANY[:2])
    assert len(directory) == 0


def test_a_directory_is_bounded_and_forgets_the_oldest() -> None:
    directory = Directory(10)
    directory.stored("a", MANY[:10])
    directory.stored("b", MANY[:1])
    directory.stored("a", MANY[10:15])
    assert len(directory) == 10
    assert directory.holders(MANY[0], {"a", "b"}) == ["b", "a"]
    assert not directory.holders(MANY[1], {"a", "b"})


def test_what_is_shunned_comes_back_by_itself() -> None:
    now = [100.0]
    shunned = Shunned(3.0, lambda: now[0], most=2)
    shunned.add("a")
    now[0] += 2.9
    assert "a" in shunned
    shunned.add("b")
    now[0] += 0.2
    assert "a" not in shunned
    assert "b" in shunned
    shunned.add("c")
    shunned.add("d")
    assert "b" not in shunned, "bounded"
