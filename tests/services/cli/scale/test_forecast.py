"""What is expected: a steady level, a change that is followed, and what comes again."""

from __future__ import annotations

from math import sqrt
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli.scale.forecast import LoadHistory, level, peak, period_of, seen


def played(work: list[float], requests: float = 20.0) -> LoadHistory:
    history = LoadHistory()
    for one in work:
        history = seen(history, one, requests)
    return history


@given(st.floats(0, 1e6), st.integers(1, 100))
def test_a_constant_load_is_its_level(work: float, looks: int) -> None:
    history = played([work] * looks)
    assert abs(level(history) - work) <= 1e-9 * work
    assert abs(peak(history, period_of(history), 8) - work) <= 1e-9 * work


def test_a_load_that_jumps_is_followed_within_some_looks() -> None:
    history = played([100.0] * 40 + [600.0] * 3)
    assert level(history) > 400.0
    assert level(played([600.0] * 40 + [100.0] * 4)) < 250.0


def test_chance_alone_is_no_change() -> None:
    """Requests that come by chance, of unlike sizes: the level is nearer to the truth than a few looks are."""
    chance = Random(1)
    history, off = LoadHistory(), []
    for look in range(200):
        sizes = [chance.expovariate(1 / 50) for _ in range(sum(chance.random() < 0.1 for _ in range(200)))]
        history = seen(history, sum(sizes), len(sizes))
        if look > 30:
            off.append((level(history) - 1000.0) / 1000.0)
    assert sqrt(sum(one * one for one in off) / len(off)) < 0.15


def square(periods: int, high: int = 20, low: int = 20) -> list[float]:
    return ([100.0] * low + [600.0] * high) * periods


def test_what_came_a_period_ago_is_expected_again() -> None:
    """As soon as it is less than the looks ahead, and half of those that are averaged, away."""
    history = played([*square(3), *[100.0] * 12])
    assert period_of(history) == 40
    assert level(history) < 150.0
    assert peak(history, 40, 2) < 400.0
    assert peak(history, 40, 8) > 550.0


def test_once_is_no_period() -> None:
    assert period_of(played(square(1))) == 0
    assert period_of(played([5.0] * 200)) == 0
    chance = Random(2)
    assert period_of(played([chance.expovariate(1) for _ in range(300)])) == 0


@settings(max_examples=40)
@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=120), st.floats(1, 10))
def test_more_work_in_every_look_is_never_expected_to_be_less(work: list[float], factor: float) -> None:
    """Nor is less a different story: the forecast scales with the load."""
    one, more = played(work), played([each * factor for each in work])
    assert level(more) >= level(one) * (1 - 1e-9)
    assert peak(more, period_of(more), 6) >= peak(one, period_of(one), 6) * (1 - 1e-6)


def test_looks_that_were_missed_count() -> None:
    history = seen(played([10.0] * 5), 10.0, 1.0, looks=7)
    assert len(history.work) == 12


def test_the_period_is_the_shortest_one_and_exact_however_requests_come() -> None:
    """Chance makes several periods as much alike as one, and moves where they are most alike."""
    for seed in range(10):
        chance, work, requests = Random(seed), list[float](), list[float]()
        for rate in square(5):
            sizes = [chance.expovariate(1.0) for _ in range(sum(chance.random() < rate / 1000 for _ in range(50)))]
            work.append(sum(sizes))
            requests.append(len(sizes))
        for looks in range(90, len(work) + 1, 10):
            assert abs(period_of(LoadHistory(tuple(work[:looks]), tuple(requests[:looks]))) - 40) <= 1


def test_where_chance_explains_that_more_came_a_period_ago_both_are_one() -> None:
    history = played([*square(2), *[100.0] * 20, *[560.0] * 10])
    assert 500.0 < level(history) < 0.5 * (level(history) + 600.0) < peak(history, 40, 4) < 600.0
    assert peak(played([*square(2), *[100.0] * 20, *[200.0] * 10]), 40, 4) > 590.0, "chance does not explain that"


def test_a_load_that_falls_is_followed_as_soon_as_one_that_rises() -> None:
    """Of work whose requests are as large as before, and of some whose requests are small."""
    high = LoadHistory((600.0,) * 60, (20.0,) * 60, 60)
    few, small = high, high
    for _ in range(2):
        few, small = seen(few, 60.0, 2.0), seen(small, 60.0, 20.0)
    assert level(few) == level(small) == 60.0, "two looks are enough"
