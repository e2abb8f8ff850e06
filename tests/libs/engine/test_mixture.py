"""Drafting pays or gets out of the way, in an engine whose seconds are made up: no clock is waited for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling.live import new_live
from penstock.engine.speculation.asking import Speculation
from penstock.engine.speculation.guess import right
from penstock.engine.stats import Counters

from .made_up_time import run

PROMPT, STEPS = 100, 1000


@dataclass(frozen=True)
class World:
    """What things cost, in ms, and how good the drafter is."""

    sequences: int = 1
    step: float = 20.0
    sequence: float = 0.2
    verify: float = 0.1
    row: float = 0.3
    contention: float = 0.0
    """By how much a step is longer for each sequence that is drafted for."""
    delay: float = 0.0
    """To the drafter and back."""
    draft: float = 0.5
    """One token of the drafter, for all sequences."""
    accepted: float = 0.9
    noise: float = 0.1
    most: int = 16

    def seconds(self, drafts, ahead):
        rows = self.sequence * self.sequences + self.row * drafts
        return (self.step + rows + self.verify * (drafts > 0) + self.contention * ahead) / 1e3


def truth(ticket, place):
    return (place * 7 + ticket) % 97


@dataclass
class _Drafted:
    ask: object
    length: int
    """What it knows the text to be, at least."""
    guesses: list = field(default_factory=list)
    told: float = 0.0
    text: int = 0
    at_hand: tuple = (0, ())
    judged: tuple = (0, 0)


class Drafter:
    """Runs ahead of what it was told, at the other end of a slow line."""

    def __init__(self, loop, world, tickets):
        self.loop, self.world, self.tickets = loop, world, tickets
        self.known, self.news, self.draw = {}, asyncio.Event(), Random(5)
        self.busy = False

    def tell(self, asks):
        for ask in asks:
            self.loop.call_later(self.world.delay / 2e3, self._told, ask.id, len(ask.tokens), ask.k)
            one = self.known.setdefault(ask.id, _Drafted(0, 0))
            one.told, one.text = self.loop.time(), len(ask.tokens)
            self._settle(ask.id)

    def _told(self, id, length, k):
        one, ticket = self.known[id], self.tickets[id]
        came = [truth(ticket, place) for place in range(one.length, length)]
        one.guesses = one.guesses[len(came) :] if one.guesses[: len(came)] == came else []
        one.length, one.ask = length, k
        self._work()

    def _work(self):
        if not self.busy and any(len(one.guesses) < one.ask for one in self.known.values() if one.length):
            self.busy = True
            self.loop.call_later(self.world.draft / 1e3, self._drafted)

    def _drafted(self):
        self.busy = False
        for id, one in self.known.items():
            if one.length and len(one.guesses) < one.ask:
                place = one.length + len(one.guesses)
                real = truth(self.tickets[id], place)
                one.guesses.append(real if self.draw.random() < self.world.accepted else (real + 1) % 97)
            self.loop.call_later(self.world.delay / 2e3, self._came, id, one.length, tuple(one.guesses))
        self._work()

    def _came(self, id, length, guesses):
        one = self.known[id]
        if length >= one.at_hand[0] or not one.at_hand[1]:
            one.at_hand = (length, guesses)
            self._settle(id)
        self.news.set()

    def ahead(self, id, length):
        """As a client does: what is at hand is compared with the text when that is told."""
        one = self.known[id]
        return one.at_hand[1] if one.at_hand[0] == length else ()

    def judged(self, id):
        judged, self.known[id].judged = self.known[id].judged, (0, 0)
        return judged

    def _settle(self, id):
        one, ticket = self.known[id], self.tickets[id]
        begin, guesses = one.at_hand
        came = [truth(ticket, place) for place in range(begin, one.text)]
        hits = right(guesses, came)
        met = min(len(guesses), len(came))
        one.judged = one.judged[0] + hits, one.judged[1] + (hits < met)
        one.at_hand = (begin + met, guesses[met:]) if hits == met else (one.text, ())

    def expected(self, id, count):
        one = self.known[id]
        more = count - (len(one.at_hand[1]) if one.at_hand[0] == one.text else 0)
        due = one.told + (self.world.delay + max(1, more) * self.world.draft) / 1e3
        return max(1e-5, due - self.loop.time()) if more > 0 else 0.0

    async def arrived(self):
        self.news.clear()
        await self.news.wait()

    def forget(self, id):
        pass


def speed_up(world, tmp_path):
    """Tokens per second with the drafter : without."""

    async def main(loop):
        lives = [
            new_live(
                Request(str(at), tuple(truth(at, place) for place in range(PROMPT)), SamplingParams(10**6)),
                at,
                frozenset(),
            )
            for at in range(world.sequences)
        ]
        counters, draw = Counters(), Random(3)
        drafter = Drafter(loop, world, {live.id: live.ticket for live in lives})
        config = EngineConfig(model=tmp_path, draft_tokens=world.most)
        speculation = Speculation(config, 97, drafter, None, None, counters=counters)
        for live in lives:
            speculation.begin(live)
        for _ in range(STEPS):
            drafts = await speculation.ask(lives, lambda: None)
            seconds = world.seconds(sum(map(len, drafts.values())), speculation.asked)
            await asyncio.sleep(seconds)
            for live in lives:
                live.computed = len(live.tokens) - 1
                live.run.aim(live.computed, 1, drafts.get(live.ticket, ()))
            speculation.timed(seconds * draw.uniform(1 - world.noise, 1 + world.noise), [live.run for live in lives])
            for live in lives:
                came = [truth(live.ticket, len(live.tokens) + more) for more in range(world.most + 1)]
                hits = right(live.run.choice.drafts, came)
                speculation.learn(live, len(live.run.choice.drafts), hits)
                live.tokens += came[: hits + 1]
        tokens = sum(len(live.tokens) - PROMPT for live in lives)
        return tokens / loop.time() / (world.sequences / world.seconds(0, 0))

    return run(main)


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
def test_never_slower_than_without(tmp_path, costs, delay, accepted):
    assert speed_up(World(accepted=accepted, delay=delay, **costs), tmp_path) > 0.97


@pytest.mark.parametrize("accepted", [0.5, 0.9])
@pytest.mark.parametrize("delay", [0, 5])
def test_where_drafts_hardly_pay_noise_costs_up_to_six_percent(tmp_path, delay, accepted):
    world = World(sequences=8, step=5.0, sequence=1.5, row=1.5, delay=delay, accepted=accepted)
    assert speed_up(world, tmp_path) > 0.94


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
def test_faster_where_it_can_be(tmp_path, world, least):
    assert speed_up(world, tmp_path) > least
