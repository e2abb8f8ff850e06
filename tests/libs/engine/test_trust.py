"""What is believed of guesses, against guesses whose truth is known."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.speculation.guess import Guess, right
from penstock.engine.speculation.trust import DraftRate, Trust

tokens = st.lists(st.integers(0, 2), max_size=8)


@given(tokens, tokens)
def test_right_counts_the_common_beginning(guessed, came):
    naive = 0
    while naive < len(guessed) and naive < len(came) and guessed[naive] == came[naive]:
        naive += 1
    assert right(guessed, came) == naive


@pytest.mark.parametrize("truth", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("claim", [0.3, 0.9])
def test_chances_are_corrected_to_what_comes_of_them(truth, claim):
    trust, draw = Trust(), Random(1)
    seen = []
    for _ in range(2000):
        guess = Guess((1, 1, 1), (claim,) * 3)
        seen.append(trust.corrected(guess).chances[0])
        trust.learn(guess, [int(draw.random() < truth) for _ in range(3)])
    assert sum(seen[200:]) / len(seen[200:]) == pytest.approx(truth, abs=0.1), "up to what the prior still weighs"


def test_one_that_was_wrong_for_long_is_believed_again_soon():
    trust, guess = Trust(), Guess((1,), (0.9,))
    for _ in range(500):
        trust.learn(guess, [2])
    assert trust.corrected(guess).chances[0] < 0.05
    for _ in range(30):
        trust.learn(guess, [1])
    assert trust.corrected(guess).chances[0] > 0.5


def test_what_has_not_come_yet_says_nothing():
    trust = Trust()
    trust.learn(Guess((1, 2, 3), (0.5, 0.5, 0.5)), [1])
    assert (trust.right, trust.promised) == (1, 0.5)
    trust.learn(Guess((1, 2, 3), (0.5, 0.5, 0.5)), [])
    assert (trust.right, trust.promised) == (1, 0.5)


def test_a_rate_is_learned():
    rate, draw = DraftRate(), Random(2)
    for _ in range(3000):
        rate.learn(1, 0)
    assert rate.chance == pytest.approx(1.0, abs=0.02)
    for _ in range(5000):
        hit = draw.random() < 0.3
        rate.learn(int(hit), int(not hit))
    assert rate.chance == pytest.approx(0.3, abs=0.1)


def test_a_guess_hopes_for_what_is_accepted_on_average():
    draw, guess = Random(3), Guess((1, 1, 1), (0.8, 0.5, 0.9))
    assert guess.reach == pytest.approx((0.8, 0.4, 0.36))
    came = [right(guess.tokens, [int(draw.random() < chance) for chance in guess.chances]) for _ in range(20_000)]
    assert sum(came) / len(came) == pytest.approx(guess.hope, abs=0.02)
    assert guess.cut(1) == Guess((1,), (0.8,)) and guess.cut(9) is guess
