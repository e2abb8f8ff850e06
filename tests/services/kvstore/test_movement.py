"""What earns the disk, in which order, and how much may be written: pure, no disk in sight."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.services.kvstore.helpers import ROOT, keys

from penstock.kvstore.sessions import KnownSession, SessionPhase
from penstock.kvstore.table.blocks import Block
from penstock.kvstore.tiers.disk.budget import DAY_S, WriteBudget
from penstock.kvstore.tiers.disk.health import Health
from penstock.kvstore.tiers.disk.movement import THRESHOLD, Candidates, Merit, Reuse, worth

NOW = 100.0


def block(number: int = 0, **more: float) -> Block:
    made = Block(keys(number + 1)[number], ROOT, 0, number, number + 1, "s")
    for name, value in more.items():
        setattr(made, name, value)
    return made


def outlook(state: SessionPhase) -> KnownSession:
    return KnownSession(state, 0.0, math.inf)


@pytest.mark.parametrize(
    ("one", "known", "share", "right"),
    [
        (block(retained_until=NOW + 1), outlook(SessionPhase.ENDED), 0.0, Merit.PROMISED),
        (block(retained_until=NOW), None, 0.0, Merit.NONE),
        (block(), outlook(SessionPhase.ACTIVE), 0.0, Merit.EXPECTED),
        (block(), outlook(SessionPhase.TOOL), 0.0, Merit.EXPECTED),
        (block(), outlook(SessionPhase.USER), 0.0, Merit.EXPECTED),
        (block(uses=1), outlook(SessionPhase.ENDED), 0.0, Merit.PROVEN),
        (block(uses=1), None, 0.0, Merit.PROVEN),
        (block(), None, THRESHOLD, Merit.LIKELY),
        (block(), outlook(SessionPhase.ENDED), THRESHOLD, Merit.LIKELY),
        (block(), None, THRESHOLD * 0.99, Merit.NONE),
    ],
)
def test_what_a_block_earns(one: Block, known: KnownSession | None, share: float, right: Merit) -> None:
    assert worth(one, known, share, NOW) is right


def test_fresh_blocks_are_written_until_it_is_known_that_they_are_not_used_again() -> None:
    reuse, fates = Reuse(), 0
    assert reuse.share >= THRESHOLD
    while reuse.share >= THRESHOLD:
        reuse.learn(False)
        fates += 1
        assert fates < 10_000
    assert fates > 100, "not at the first disappointment"
    for _ in range(fates):
        reuse.learn(True)
    assert reuse.share > 0.4, "and it is unlearned"


@given(st.lists(st.booleans(), max_size=20_000))
def test_the_share_is_a_share(fates: list[bool]) -> None:
    reuse = Reuse()
    for used in fates:
        reuse.learn(used)
    assert 0 <= reuse.share <= 1


@given(
    st.lists(st.tuples(st.sampled_from(["add", "again", "discard", "take"]), st.integers(0, 7), st.sampled_from(Merit)))
)
def test_candidates_against_a_list(steps: list[tuple[str, int, Merit]]) -> None:
    earned: dict[bytes, Merit] = {}
    line: list[Block] = []  # in the order in which each came to its present worth
    blocks = [block(number) for number in range(8)]
    candidates = Candidates(lambda one: earned[one.key])
    held: dict[bytes, Merit] = {}
    for what, number, value in steps:
        one = blocks[number]
        earned[one.key] = value
        if what == "discard":
            candidates.discard(one.key)
            line = [other for other in line if other is not one]
            held.pop(one.key, None)
        elif what == "take":
            ready = sorted((other for other in line if held[other.key] is not Merit.NONE), key=lambda o: held[o.key])
            taken = ready[: number // 2]
            assert candidates.take(number // 2) == taken
            line = [other for other in line if other not in taken]
            for other in taken:
                del held[other.key]
        elif what == "add" or one.key in held:
            getattr(candidates, what)(one)
            if held.get(one.key) is not value:
                line = [other for other in line if other is not one] + [one]
                held[one.key] = value
        else:
            candidates.again(one)
        assert candidates.waiting == list(held.values()).count(Merit.NONE)
        assert len(candidates) == len(held) - candidates.waiting


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 3000)), max_size=60))
def test_the_budget_is_kept_over_every_span(steps: list[tuple[float, int]]) -> None:
    budget, now, written = WriteBudget(per_s=1000, per_day=20_000), 0.0, []
    for pause, size in steps:
        now += pause
        if budget.wait_s(size, now, 5 * DAY_S + now) == 0:
            budget.spend(size, 5 * DAY_S + now)
            written.append((now, size))
    assert sum(size for _, size in written) <= 20_000
    for begin, _ in written:
        for end, _ in written:
            span = sum(size for at, size in written if begin <= at <= end)
            assert begin > end or span <= 1000 * (end - begin) + 2 * 3000 + 1000


def test_the_wait_is_as_long_as_needed() -> None:
    budget = WriteBudget(per_s=1000, per_day=10_000)
    assert budget.wait_s(1000, 0.0, 0.0) == 0
    budget.spend(1000, 0.0)
    assert budget.wait_s(500, 0.0, 0.0) == pytest.approx(0.5)
    assert budget.wait_s(500, 0.5, 0.5) == 0
    budget.spend(9000, 0.5)
    assert budget.wait_s(1, 1000.0, 1000.0) == DAY_S - 1000.0, "until tomorrow"
    assert budget.wait_s(1, DAY_S, DAY_S) == 0


def test_a_failing_direction_rests_longer_each_time_and_recovers() -> None:
    health, now, pauses = Health(), 0.0, []
    for _ in range(8):
        health.failed("bad", now)
        pauses.append(health.until - now)
        assert not health.usable(health.until - 0.01)
        now = health.until
        assert health.usable(now)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert health.worked(), "news"
    assert not health.worked(), "no news"
    assert health.failed("bad", now)
    assert not health.failed("bad", now), "said once"
    assert health.failed("worse", now)


def test_failures_of_what_was_under_way_together_are_one() -> None:
    health = Health()
    for _ in range(8):
        health.failed("bad", 5.0)
    assert (health.until, health.failures) == (6.0, 8)
    health.failed("bad", 6.0)
    assert health.until == 8.0
