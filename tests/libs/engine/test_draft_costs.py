"""What drafts cost, what they have saved, and whether they come in time, without an engine."""

from __future__ import annotations

import pytest

from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling.live import new_live
from penstock.engine.speculation.ahead import RunningAhead, StepBeside
from penstock.engine.speculation.balance import Balance
from penstock.engine.speculation.costs import DraftCosts, HeldUp
from penstock.engine.stats import Counters

PLAIN_S = 0.001


def paid(balance: Balance, seconds: float) -> Balance:
    balance.pay(seconds)
    balance.step(PLAIN_S)
    return balance


def test_what_a_drafter_has_saved_carries_it_through_a_while_in_which_it_is_wrong():
    saved, new = paid(Balance(), 0.0), paid(Balance(), 0.0)
    paid(saved, -1.0)
    assert paid(saved, 30 * PLAIN_S).open and not paid(new, 30 * PLAIN_S).open
    assert not paid(saved, 25 * PLAIN_S).open, "it keeps 48 steps of the thousand that it has saved"


def test_a_closed_drafter_opens_again_after_its_share_of_some_hundred_steps():
    balance = paid(Balance(), 0.0)
    paid(balance, 12.5 * PLAIN_S)
    steps = 0
    while not balance.open:
        balance.step(PLAIN_S)
        steps += 1
    assert 600 < steps < 900


def test_one_step_that_is_held_up_counts_as_twice_what_was_expected_and_the_next_in_full():
    held_up = HeldUp()
    assert [held_up.without(seconds, 1.0) for seconds in (1.0, 9.0, 9.0, 1.0, 9.0)] == [1.0, 2.0, 9.0, 1.0, 2.0]


def test_rows_that_were_dear_are_known_to_be_cheap_from_steps_with_always_as_many():
    costs = DraftCosts()
    for drafts in (0, 8, 2, 0, 10, 6, 0, 4, 12, 0):
        costs.learn(PLAIN_S * (1 + drafts), 1, 100, drafts, 0)
    for number in range(3000):
        costs.learn(PLAIN_S * (1.4 if number % 100 == 0 else 1.0), 1, 100, 4 if number % 100 == 0 else 0, 0)
    step = costs.step(1, 100)
    assert step.of(4) == pytest.approx(1.4 * PLAIN_S, rel=0.1) and step.pays(1, 4)


class Prompt:
    """A drafter that answers at once, or never in time."""

    delay_s = PLAIN_S

    def __init__(self, drafts: tuple[int, ...]) -> None:
        self.drafts = drafts

    def tell(self, asks):
        pass

    def ahead(self, id, length):
        return self.drafts

    def judged(self, id):
        return 9, 0


@pytest.mark.parametrize("drafts, asked", [((1,) * 16, 1), ((), 0)])
def test_a_drafter_is_asked_as_long_as_its_drafts_are_at_hand(drafts, asked):
    """All of them are right, and they would be worth it."""
    costs = DraftCosts()
    for number in range(400):
        count = 8 * (number % 5 == 0)
        costs.learn(PLAIN_S * (1 + 0.1 * count + number % 2), 1, 100, count, number % 2)
    ahead = RunningAhead(Prompt(drafts), costs, Counters(), 0.05)
    live = new_live(Request("a", (1, 2, 3), SamplingParams(500)), 1, frozenset())
    sequences = [ahead.begin(live)]
    for _ in range(120):  # it is tried again after 128
        step = costs.step(1, 100)
        ahead.look_back(sequences)
        ahead.tell(sequences, (16,), StepBeside(1, step, (0.0,)))
        ahead.offer(sequences[0], 16)
    assert ahead.asked == asked
