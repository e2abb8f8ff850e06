"""A head pays or gets out of the way, in an engine whose seconds are made up: no clock is waited for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

import pytest
import torch

from penstock.engine.config import EngineConfig
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling.live import new_live
from penstock.engine.speculation.asking import Speculation
from penstock.engine.speculation.guess import Guess, right
from penstock.engine.speculation.heading import Heading
from penstock.engine.stats import Counters

from .made_up_time import run

STEPS = 500


@dataclass(frozen=True)
class World:
    """What things cost, in ms, and how good the head is."""

    sequences: int = 1
    step: float = 20.0
    row: float = 0.5
    """Of a draft that is verified, and of a sequence."""
    call: float = 0.5
    guess: float = 1.0
    """One step of the head, for all sequences."""
    accepted: float = 0.9
    says: float | None = None
    """The chance that it gives its tokens; None: the real one."""

    def seconds(self, rows):
        return (self.step + self.row * rows) / 1e3


def truth(ticket, place):
    return (ticket * 31 + place * 7) % 97


class Guesser:
    """Right as often as the world says."""

    def __init__(self, world):
        self.world, self.draw = world, Random(5)
        self.rows = self.steps = self.calls = 0

    def guess(self, asks):
        self.rows = self.steps = 0
        self.calls += 1
        guesses = []
        for ask in asks:
            begin, features = ask.watched.rows()
            assert begin + len(features) == len(ask.tokens) - 1
            ticket = ask.tokens[0]
            real = [truth(ticket, len(ask.tokens) + more) for more in range(ask.count)]
            tokens = [one if self.draw.random() < self.world.accepted else (one + 1) % 97 for one in real]
            chance = self.world.accepted if self.world.says is None else self.world.says
            guesses.append(Guess(tuple(tokens), (chance,) * ask.count))
            self.rows += len(features) + ask.count - 1
        self.steps = max(ask.count for ask in asks)
        return guesses


@dataclass
class Outcome:
    speed: float
    """Tokens per second, with the head : without."""
    featured: float
    """Share of the rows of sequences whose features were asked for."""
    calls: int


def outcome(world, tmp_path):
    async def main(loop):
        guesser, counters = Guesser(world), Counters()

        async def compute(lives, work, begun):
            guesses = work()
            await asyncio.sleep((world.call + world.guess * guesser.steps + 0.05 * guesser.rows) / 1e3)
            return guesses

        lives = [
            new_live(Request(str(at), (at, *range(9)), SamplingParams(10**6)), at, frozenset())
            for at in range(world.sequences)
        ]
        heading = Heading(guesser, compute, counters, always=False)
        config = EngineConfig(model=tmp_path, draft_tokens=8)
        speculation = Speculation(config, 97, None, None, heading, counters=counters)
        for live in lives:
            speculation.begin(live)
        featured = 0
        for _ in range(STEPS):
            drafts = await speculation.ask(lives, lambda: None)
            seconds = world.seconds(sum(map(len, drafts.values())) + len(lives))
            await asyncio.sleep(seconds)
            for live in lives:
                live.computed = len(live.tokens) - 1
                live.run.aim(live.computed, 1, drafts.get(live.ticket, ()))
                if live.run.featured:
                    featured += 1
                    live.run.features = torch.zeros(live.run.tokens, 1)
            speculation.timed(seconds, [live.run for live in lives])
            for live in lives:
                came = [truth(live.ticket, len(live.tokens) + more) for more in range(9)]
                hits = right(live.run.choice.drafts, came)
                speculation.learn(live, len(live.run.choice.drafts), hits)
                live.tokens += came[: hits + 1]
                live.computed += hits + 1
            speculation.computed(lives)
        tokens = sum(len(live.tokens) - 10 for live in lives)
        speed = tokens / loop.time() / (world.sequences / world.seconds(world.sequences))
        return Outcome(speed, featured / STEPS / world.sequences, guesser.calls)

    return run(main)


@pytest.mark.parametrize("says", [None, 0.9])
@pytest.mark.parametrize("accepted", [0.0, 0.3, 0.6, 0.95])
@pytest.mark.parametrize(
    "costs",
    [
        {},
        {"step": 2.0, "row": 0.3, "guess": 0.4},
        {"step": 2.0, "row": 0.3, "guess": 2.0},
        {"sequences": 4},
        {"sequences": 16, "step": 5.0, "row": 1.5},
    ],
    ids=["large", "small", "head as slow as the model", "four", "saturated"],
)
def test_never_slower_than_without(tmp_path, costs, accepted, says):
    assert outcome(World(accepted=accepted, says=says, **costs), tmp_path).speed > 0.97


@pytest.mark.parametrize(
    "world, least",
    [(World(), 2.5), (World(accepted=0.7), 1.6), (World(step=3.0, row=0.1, guess=0.4), 1.7), (World(sequences=4), 2.0)],
)
def test_faster_where_it_can_be(tmp_path, world, least):
    assert outcome(world, tmp_path).speed > least


def test_a_head_that_is_always_wrong_rests(tmp_path):
    found = outcome(World(accepted=0.0, says=0.9, step=3.0), tmp_path)
    assert found.calls < STEPS / 10
    assert found.featured < 0.15


def test_one_that_gets_better_is_found_out(tmp_path):
    """Steps come in which it is tried again."""
    assert outcome(World(accepted=0.0, says=0.9), tmp_path).calls > 4


def test_where_no_draft_can_pay_no_states_are_kept(tmp_path):
    assert outcome(World(sequences=16, step=2.0, row=3.0), tmp_path).featured < 0.1
