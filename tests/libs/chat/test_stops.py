"""Stop strings against the obvious implementation."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.chat.stops import StopAutomaton, StopMatcher

LETTERS = st.text(alphabet="ab\n", max_size=40)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Reads letter by letter; the longest stop string that ends first counts."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(LETTERS, STOPS, st.lists(st.integers(1, 7), max_size=40))
def test_equals_the_naive_search(text, stops, sizes):
    matcher, shown, at = StopMatcher(StopAutomaton(stops)), "", 0
    for size in [*sizes, len(text)]:
        released = matcher.feed(text[at : at + size])
        shown += released
        at += size
    if not matcher.found:
        shown += matcher.finish()
    assert (shown, matcher.found) == naive(text, stops)


def test_holds_back_only_what_may_become_a_stop():
    matcher = StopMatcher(StopAutomaton(["END", "ENTER"]))
    assert [matcher.feed(piece) for piece in ("abE", "N", "x", "EN")] == ["ab", "", "ENx", ""]
    assert matcher.feed("TENDer") == "ENT"
    assert matcher.found
    assert matcher.feed("more") == ""


def test_overlapping_matches_cut_at_the_longest():
    matcher = StopMatcher(StopAutomaton(["b", "aab"]))
    assert matcher.feed("xaab") == "x"


@pytest.mark.parametrize(("stop", "worst"), [("a" * 100 + "b", "a"), ("ab" * 50 + "c", "ab"), ("b", "a")])
def test_time_is_linear(stop, worst):
    automaton = StopAutomaton([stop, stop[1:] + "!"])

    def seconds(length: int) -> float:
        text, matcher = worst * (length // len(worst)), StopMatcher(automaton)
        begin = time.perf_counter()
        for at in range(0, len(text), 4):
            matcher.feed(text[at : at + 4])
        return time.perf_counter() - begin

    seconds(1000)
    small, large = min(seconds(4_000) for _ in range(3)), seconds(64_000)
    assert large < 16 * small * 6 + 0.05
