"""How many answers will run: those that stay, those that come, and what is known of how long they last."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.scale.answers import WINDOW, AnswersCome, AnswersExpected, AnswersSeen, answers_expected

from .seen import PACE

COME = AnswersCome(per_s=2.0, tokens=100.0)
AHEAD_S = 25.0


def expected(late: list[AnswersSeen], come: AnswersCome = COME, leaving: float = 0.0) -> AnswersExpected:
    return answers_expected(late, come, PACE, leaving=leaving, every_s=5.0, ahead_s=AHEAD_S)


def test_what_is_steady_stays() -> None:
    """Two come and two end in each second; each has 25 tokens per second."""
    found = expected([AnswersSeen(100.0, 2500.0, 2.0)] * WINDOW)
    assert (found.running, found.soon, found.tokens_per_s) == pytest.approx((100.0, 100.0, 2500.0))


def test_as_long_as_none_has_ended_all_that_come_stay() -> None:
    found = expected([AnswersSeen(10.0, 300.0, 0.0)] * WINDOW)
    assert found.soon == pytest.approx(10.0 + 2.0 * AHEAD_S)
    assert found.tokens_per_s == pytest.approx(30.0 * found.soon)


def test_before_any_has_run_their_tokens_say_how_long_they_last() -> None:
    found = expected([AnswersSeen(0.0, 0.0, 0.0)])
    lasts_s = COME.tokens * (PACE.step_s + PACE.sequence_s)
    assert found.soon == pytest.approx(COME.per_s * lasts_s, rel=1e-4)


def test_answers_on_workers_that_drain_end_there() -> None:
    late = [AnswersSeen(100.0, 2500.0, 2.0)] * WINDOW
    found = expected(late, leaving=40.0)
    assert found.running == 60.0
    assert 60.0 < found.soon < 100.0, "those that come need places all the same"


@given(st.floats(0, 500), st.floats(0, 500), st.floats(1, 50), st.floats(1, 4), st.floats(0, 100))
def test_more_answers_are_never_expected_to_be_fewer(
    running: float, generated: float, ended: float, factor: float, leaving: float
) -> None:
    late = [AnswersSeen(running, generated, ended)] * WINDOW
    one = expected(late, leaving=leaving)
    assert expected(late, replace(COME, per_s=COME.per_s * factor), leaving).soon >= one.soon
    more = expected([AnswersSeen(running * factor, generated * factor, ended * factor)] * WINDOW, leaving=leaving)
    assert more.running >= one.running and more.soon >= one.soon * (1 - 1e-9)
    assert one.soon <= running + COME.per_s * max(AHEAD_S, COME.tokens) + 1e-6


def test_lengths_that_change_are_noticed_within_a_minute() -> None:
    """Answers of 80 s in the mean, and then of 4 s, played one by one: what is expected is near to what comes to be."""
    chance, ends, counts = Random(1), list[float](), list[tuple[float, float]]()
    late, found, ended = list[AnswersSeen](), dict[float, float](), 0
    for second in range(600):
        ends += [second + chance.expovariate(1 / (80.0 if second < 300 else 4.0)) for _ in range(2)]
        ended += sum(end <= second for end in ends)
        ends = [end for end in ends if end > second]
        if second % 5 == 0:
            counts.append((second, len(ends)))
            late = [*late, AnswersSeen(len(ends), 25.0 * len(ends), ended / 5.0)][-WINDOW:]
            found[second + AHEAD_S], ended = expected(late).soon, 0
    known = [(at, found[at], count) for at, count in counts if at in found]
    assert all(abs(soon - count) < 10 + 0.5 * count for _, soon, count in known)
    assert sum(abs(soon - count) for at, soon, count in known) < 0.1 * sum(count for *_, count in known)
