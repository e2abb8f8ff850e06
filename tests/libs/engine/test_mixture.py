"""Drafting pays or gets out of the way, in an engine whose seconds are made up: no clock is waited for."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling.live import new_live
from penstock.engine.speculation.ahead import RunningAhead, StepBeside
from penstock.engine.speculation.costs import DraftCosts
from penstock.engine.speculation.depths import StepSeconds
from penstock.engine.stats import Counters

from .made_up_drafts import Phase, World, best, mixture, plain, speeds
from .made_up_time import run

LONG = 3000
"""Tokens of a long run: twelve answers of 256 tokens, one after the other."""
STEPS = 1500
"""Tokens of each stream, where there are several."""
WORST = 0.97
"""Of plain decoding, the least that any long run may give."""
EMBEDDED = World(step=3.9, sequence=0.1, verify=0.2, row=0.4, draft=0.3, contention=0.2)
"""Steps as quick as the embedded model's, and a drafter on a host of its own: messages alone cost time."""
DELAYS = (0, 2, 5, 10, 20, 50)


def embedded(accepted, delay, **more):
    return replace(EMBEDDED, accepted=accepted, delay=delay, **more)


def ratios(*phases, answer=256):
    """Of each phase, tokens per second with the mixture : without drafts."""
    found = speeds(phases, lambda drafter: mixture(drafter, phases[0].world.most), answer)
    return [rate / plain(phase.world) for rate, phase in zip(found, phases, strict=True)]


@pytest.mark.parametrize("accepted", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("delay", [0, 5, 50])
@pytest.mark.parametrize(
    "costs",
    [
        {},
        {"step": 1.0, "row": 0.2, "draft": 0.4},
        {"sequences": 4, "contention": 2.0},
        {"sequences": 16, "row": 1.5, "sequence": 1.5, "step": 5.0},
        {"step": 3.0, "draft": 3.0, "contention": 3.0},
    ],
    ids=["reads weights", "small", "four", "saturated", "drafter as slow as the target"],
)
def test_never_slower_than_without(costs, delay, accepted):
    world = World(accepted=accepted, delay=delay, **costs)
    assert ratios(Phase(world, STEPS * world.sequences))[0] > WORST


@pytest.mark.parametrize("accepted", [0.5, 0.9])
@pytest.mark.parametrize("delay", [0, 5])
def test_where_drafts_hardly_pay_noise_costs_no_more(delay, accepted):
    world = World(sequences=8, step=5.0, sequence=1.5, row=1.5, delay=delay, accepted=accepted)
    assert ratios(Phase(world, STEPS * world.sequences))[0] > WORST


@pytest.mark.parametrize(
    "world, least",
    [
        (World(), 3.0),
        (World(delay=5.0), 2.5),
        (World(accepted=1.0, delay=20.0), 4.0),
        (World(step=3.0, accepted=1.0, row=0.1), 3.0),
        (World(sequences=4), 2.5),
    ],
)
def test_faster_where_it_can_be(world, least):
    assert ratios(Phase(world, STEPS * world.sequences), answer=1000)[0] > least


@pytest.mark.parametrize("accepted", [0.95, 0.8, 0.5, 0.2])
@pytest.mark.parametrize("delay", DELAYS)
def test_behind_a_link_it_is_never_slower(accepted, delay):
    assert ratios(Phase(embedded(accepted, delay), LONG))[0] > WORST


@pytest.mark.parametrize("accepted, delay", [(0.95, 0), (0.95, 10), (0.95, 50), (0.8, 0), (0.8, 2), (0.8, 5)])
def test_behind_a_link_it_is_nearly_the_best(accepted, delay):
    """Of the policies that are the same in all steps, in hindsight. It has to find out."""
    world = embedded(accepted, delay)
    assert ratios(Phase(world, STEPS))[0] > 0.75 * best(world, STEPS) / plain(world)


def test_a_link_that_jitters_costs_nothing():
    for accepted in (0.95, 0.5, 0.0):
        assert ratios(Phase(embedded(accepted, 10, jitter=2.0), LONG))[0] > WORST


@pytest.mark.parametrize("accepted, delay, least", [(0.95, 0, 2.0), (0.95, 10, 1.3), (0.8, 2, 1.2), (0.0, 2, WORST)])
def test_steps_that_the_machine_holds_up_are_no_cost_of_drafts(accepted, delay, least):
    assert ratios(Phase(embedded(accepted, delay, held_up=0.05), 2 * LONG))[0] > least


def test_two_streams_are_served_at_once():
    assert ratios(Phase(embedded(0.95, 10, sequences=2), LONG))[0] > 1.3
    assert ratios(Phase(embedded(0.1, 10, sequences=2), LONG))[0] > WORST


def test_each_cell_of_a_bench_comes_after_another():
    """What was learned of one delay costs nothing in the next."""
    worlds = [embedded(accepted, delay) for accepted in (0.95, 0.8, 0.0) for delay in DELAYS]
    found = ratios(*(Phase(world, LONG) for world in worlds))
    assert min(found) > WORST


CHANGES = {
    "useless": (embedded(0.95, 1), embedded(0.2, 1)),
    "far away": (embedded(0.9, 1), embedded(0.6, 30)),
    "useless and far away": (embedded(0.95, 1), embedded(0.0, 50)),
    "dear": (embedded(0.9, 1), embedded(0.9, 1, contention=12.0)),
    "beside dearer steps": (embedded(0.8, 10), embedded(0.8, 10, step=8.0, row=4.0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_drafter_that_changes_is_left_and_found_again(name):
    well, ill = CHANGES[name]
    found = ratios(Phase(well, LONG), Phase(ill, LONG), Phase(well, 1000), Phase(well, LONG))
    assert found[1] > WORST
    assert found[2] > WORST and found[3] > 0.9 * found[0], "a thousand tokens later it is used as before"


def test_a_useless_drafter_is_seldom_looked_at():
    """A look takes time that no step here counts: most steps have none while nothing is asked."""
    drafters = []

    def made(drafter):
        drafters.append(drafter)
        return mixture(drafter, 16)

    speeds([Phase(embedded(0.0, 5), LONG)], made)
    assert drafters[0].looks < LONG / 8


def test_a_useless_drafter_computes_the_texts_of_few_of_many_sequences():
    """To know a text costs it that time on the same machine, which no step here counts."""
    asked: set[str] = set()

    def made(drafter):
        tell = drafter.tell

        def told(asks):
            asked.update(ask.id for ask in asks if ask.k)
            tell(asks)

        drafter.tell = told
        return mixture(drafter, 16)

    world, answer = embedded(0.0, 0, sequences=16, contention=0.01), 128
    speeds([Phase(world, 40 * 16 * answer)], made, answer)
    assert len(asked) < 40 * 16 / 4


class Uneven:
    """Its drafts of `a` come after a millisecond. It says that those of `b` come later, and they never do."""

    delay_s = 0.001

    def __init__(self, loop):
        self.loop, self.came = loop, asyncio.Event()

    def tell(self, asks):
        if any(ask.k for ask in asks):
            self.loop.call_later(0.001, self.came.set)

    def ahead(self, id, length):
        return (1, 1, 1, 1) if id == "a" and self.came.is_set() else ()

    def judged(self, id):
        return 0, 0

    def expected(self, id, count=1):
        if id == "b":
            return 0.02
        return 0.0 if self.came.is_set() else 0.001

    async def arrived(self):
        await self.came.wait()
        await asyncio.sleep(0)


def test_a_step_waits_for_those_alone_that_are_worth_it():
    async def main(loop):
        counters = Counters()
        ahead = RunningAhead(Uneven(loop), DraftCosts(), counters, 0.05)
        lives = [
            new_live(Request(id, (1, 2, 3), SamplingParams(50)), ticket, frozenset()) for ticket, id in enumerate("ab")
        ]
        sequences = [ahead.begin(live) for live in lives]
        beside = StepBeside(2, StepSeconds(0.01, 0.0, 0.0001), (0.0, 0.0))
        ahead.tell(sequences, (4, 4), beside)
        assert ahead.asked == 2
        return await ahead.wait(sequences, beside, lambda: None), counters.draft_failures

    waited_s, failures = run(main)
    assert (round(waited_s, 6), failures) == (0.001, 0)


def test_drafts_that_were_too_dear_to_verify_are_tried_again():
    """Each took as long as a step; nobody knows that it does no more until some are verified."""
    well, dear = embedded(0.9, 1), embedded(0.9, 1, row=4.0)
    found = ratios(Phase(well, 1000), Phase(dear, 2 * LONG), Phase(well, LONG), Phase(well, LONG))
    assert found[1] > WORST and found[3] > 0.8 * found[0]
