"""What is learned of reuse: against a count of everything, on known distributions, and within its bounds."""

from __future__ import annotations

import random
from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.libs.kv.eviction.helpers import key

from penstock.kv.eviction import reuse
from penstock.kv.eviction.reuse import BUCKETS, EDGES, ReuseTimes, bucket

GROUPS = 3
Use = tuple[float, int, int]


def naive_hazards(uses: list[Use], now: float) -> list[list[float]]:
    """From the list of all uses (seconds since the last one, key, class), read once for each question."""
    intervals: list[tuple[int, float, bool]] = []
    clock = 0.0
    open_: dict[int, tuple[float, int]] = {}
    for wait, name, group in uses:
        clock += wait
        before = open_.get(name)
        if before is not None and clock - before[0] < EDGES[1]:
            open_[name] = (before[0], group)
            continue
        if before is not None:
            intervals.append((before[1], clock - before[0], True))
        open_[name] = (clock, group)
    intervals += [(group, now - start, False) for start, group in open_.values()]

    def counted(at: int, groups: range) -> tuple[float, float]:
        used = risk = 0.0
        for group, length, ended in intervals:
            place = bisect_right(EDGES, length) - 1
            if group not in groups or place < at:
                continue
            used += ended and place == at
            risk += 1.0 if ended or place > at else 0.5
        return used, risk

    table = []
    for group in range(GROUPS):
        row = []
        for at in range(BUCKETS):
            used, risk = counted(at, range(GROUPS))
            pooled = (used + reuse._PRIOR_WEIGHT * reuse._PRIOR) / (risk + reuse._PRIOR_WEIGHT)
            used, risk = counted(at, range(group, group + 1))
            row.append((used + reuse._POOL_WEIGHT * pooled) / (risk + reuse._POOL_WEIGHT))
        table.append(row)
    return table


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.01, 0.3, 7.0, 400.0]), st.integers(0, 6), st.integers(0, GROUPS - 1)),
        max_size=60,
    ),
    st.sampled_from([0.0, 3.0, 1e5]),
)
def test_hazards_are_those_of_a_life_table(uses: list[Use], later: float) -> None:
    times, now = ReuseTimes(GROUPS), 0.0
    for wait, name, group in uses:
        now += wait
        times.use(key(name), group, now)
    for found, expected in zip(times.hazards(now + later), naive_hazards(uses, now + later), strict=True):
        assert found == pytest.approx(expected)


@given(st.lists(st.floats(0, 0.9), min_size=BUCKETS, max_size=BUCKETS))
def test_the_rate_is_the_best_over_all_ends(hazards: list[float]) -> None:
    rates = reuse._rates(hazards)
    for start in range(BUCKETS - 1):
        for end in range(start, BUCKETS - 1):
            unused, time = 1.0, 0.0
            for at in range(start, end + 1):
                time += unused * (EDGES[at + 1] - EDGES[at]) * (1 - hazards[at] / 2)
                unused *= 1 - hazards[at]
            assert rates[start] >= (1 - unused) / time * (1 - 1e-9)


def learned(gaps: list[float], seed: int = 1) -> list[float]:
    """Rates after many keys came back after one of `gaps` seconds each, over and over; infinity: never."""
    source, times = random.Random(seed), ReuseTimes(1)
    events = sorted((source.uniform(0, 500), name) for name in range(3000))
    at = 0
    while at < len(events):
        now, name = events[at]
        times.use(key(name), 0, now)
        gap = source.choice(gaps)
        if gap < 1e9:
            events.append((now + gap, name))
            events.sort()
        at += 1
        if at > 6000:
            break
    return times.rates(now)[0]


def test_blocks_that_come_back_late_are_worth_more_when_they_are_older() -> None:
    rates = learned([60.0, float("inf")])
    assert rates[bucket(40.0)] > 1.5 * rates[bucket(1.0)], "their time comes nearer"
    assert rates[bucket(40.0)] > 10 * rates[bucket(150.0)], "they have missed it"


def test_more_keys_than_room_are_a_sample() -> None:
    source, few, all_ = random.Random(2), ReuseTimes(1, most=200), ReuseTimes(1, most=1 << 20)
    names = [source.randbytes(32) for _ in range(5000)]
    for round_ in range(4):
        for at, name in enumerate(names):
            if round_ == 0 or at % 2:
                now = 50.0 * round_ + 0.001 * at
                few.use(name, 0, now)
                all_.use(name, 0, now)
            assert len(few) <= 200
    assert len(all_) == 5000
    there, here = all_.hazards(200.0)[0], few.hazards(200.0)[0]
    assert here[bucket(50.0)] == pytest.approx(there[bucket(50.0)], rel=0.35)
    assert 0.1 < there[bucket(50.0)] < 0.9


def test_only_the_latest_intervals_count() -> None:
    times = ReuseTimes(1, most=500)
    for step in range(2000):
        times.use(key(step % 10), 0, step * 1.0)
    assert times.hazards(2000.0)[0][bucket(10.0)] > 0.8
    for step in range(2000):
        times.use(key(step % 10), 0, 2000.0 + step * 20.0)
    hazards = times.hazards(42_000.0)[0]
    assert hazards[bucket(10.0)] < 0.2 < 0.8 < hazards[bucket(200.0)]
    assert len(times._window) == 1000
    assert sum(times._used[0]) + len(times) == 1000


def test_a_key_that_leaves_the_window_unused_is_forgotten() -> None:
    times = ReuseTimes(1, most=4)
    times.use(key(9), 0, 0.0)
    for step in range(8):
        times.use(key(step % 2), 0, 1.0 + step)
    assert len(times) == 2 and not times._mask
