"""Which gateway gets a request."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.picker.picking import FEW, MOST_CHOICES, order

GATEWAYS = [f"10.0.0.{number}:8080" for number in range(1, 8)]


def test_without_gateways_there_is_no_choice() -> None:
    assert order([], {}, "session", 1.25) == []


def test_without_a_session_the_least_busy_comes_first() -> None:
    waiting = {GATEWAYS[0]: 2, GATEWAYS[1]: 1}
    assert order(GATEWAYS[:3], waiting, "", 1.25) == [GATEWAYS[2], GATEWAYS[1], GATEWAYS[0]]


def test_sessions_are_spread() -> None:
    homes = Counter(order(GATEWAYS, {}, f"session {number}", 1.25)[0] for number in range(1400))
    assert set(homes) == set(GATEWAYS) and max(homes.values()) < 2 * min(homes.values())


def test_a_gateway_that_goes_moves_its_own_sessions_alone() -> None:
    for number in range(200):
        session = f"session {number}"
        before, after = order(GATEWAYS, {}, session, 1.25), order(GATEWAYS[1:], {}, session, 1.25)
        assert after[0] == (before[0] if before[0] != GATEWAYS[0] else before[1])


@given(
    waiting=st.dictionaries(st.sampled_from(GATEWAYS), st.integers(0, 50)),
    session=st.text(max_size=20),
    most_over=st.floats(1, 4),
)
def test_nobody_gets_far_more_than_a_share(waiting: dict[str, int], session: str, most_over: float) -> None:
    chosen = order(GATEWAYS, waiting, session, most_over)
    assert len(chosen) == len(set(chosen)) == MOST_CHOICES and set(chosen) <= set(GATEWAYS)
    share = (1 + sum(waiting.values())) / len(GATEWAYS)
    assert waiting.get(chosen[0], 0) < max(FEW, most_over * share + 1)


@given(waiting=st.dictionaries(st.sampled_from(GATEWAYS), st.integers(0, 9)), session=st.text(min_size=1, max_size=20))
def test_a_session_stays_unless_its_gateway_is_full(waiting: dict[str, int], session: str) -> None:
    home, chosen = order(GATEWAYS, {}, session, 4)[0], order(GATEWAYS, waiting, session, 4)[0]
    share = (1 + sum(waiting.values())) / len(GATEWAYS)
    assert chosen == home or waiting.get(home, 0) >= max(FEW, 4 * share)
