"""A decode worker and a draft service whose seconds are made up, and plain policies to compare the mixture with."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from penstock.engine.config import EngineConfig
from penstock.engine.hooks import DraftAsk, DraftTerms
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling.live import Live, new_live
from penstock.engine.speculation.asking import Speculation
from penstock.engine.speculation.guess import right
from penstock.engine.stats import Counters

from .made_up_time import run

PROMPT, VOCABULARY, HELD_UP = 100, 97, 15.0


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
    jitter: float = 0.0
    """Up to so many times the delay more."""
    draft: float = 0.5
    """One token of the drafter, for all sequences."""
    accepted: float = 0.9
    noise: float = 0.1
    held_up: float = 0.0
    """How many of the steps the machine holds up, by `HELD_UP` ms."""
    most: int = 16

    def seconds(self, sequences: int, drafts: int, ahead: int) -> float:
        rows = self.sequence * sequences + self.row * drafts
        return (self.step + rows + self.verify * (drafts > 0) + self.contention * ahead) / 1e3


def truth(id: str, place: int) -> int:
    return (place * 7 + int(id)) % VOCABULARY


@dataclass
class _Drafted:
    """A sequence, as the drafter knows it and as the worker does."""

    ask: int = 0
    length: int = 0
    """What the drafter knows the text to be."""
    guesses: list[int] = field(default_factory=list)
    """Behind that, by the drafter."""
    lead: int = 0
    """Grows whenever the drafter begins anew."""
    text: int = 0
    """As the worker told it last."""
    taken: int = 0
    """The lead of which the worker has tokens."""
    begin: int = 0
    at_hand: list[int] = field(default_factory=list)
    """Tokens that go on from `begin`."""
    wrong: bool = False
    since: float | None = None
    """When it was told of what nothing is at hand for."""
    judged: tuple[int, int] = (0, 0)

    @property
    def ready(self) -> list[int]:
        return self.at_hand if self.begin == self.text else []


class Drafter:
    """Runs ahead of what it was told, at the other end of a slow line. At a place it is right or wrong each time."""

    def __init__(self, loop, world: World) -> None:
        self.loop, self.world = loop, world
        self.known: dict[str, _Drafted] = {}
        self.news, self.draw = asyncio.Event(), Random(5)
        self.busy = False
        self.last = [0.0, 0.0]
        """When what was sent last arrives, there and here: nothing overtakes it."""
        self.looks = 0
        """How often somebody looked at what came of its tokens."""

    def _send(self, way: int, call, *args) -> None:
        delay = self.world.delay * (1 + self.world.jitter * self.draw.random()) / 2e3
        self.last[way] = max(self.last[way], self.loop.time() + delay)
        self.loop.call_at(self.last[way], call, *args)

    # There

    def _told(self, id: str, length: int, k: int) -> None:
        one = self.known.get(id)
        if one is None:
            return
        came = [truth(id, place) for place in range(one.length, length)]
        if not one.lead or one.guesses[: len(came)] != came:
            one.lead, one.guesses = one.lead + 1, came
        one.guesses = one.guesses[len(came) :]
        one.length, one.ask = length, k
        self._work()

    def _work(self) -> None:
        if not self.busy and any(len(one.guesses) < one.ask for one in self.known.values()):
            self.busy = True
            self.loop.call_later(self.world.draft / 1e3, self._drafted)

    def _drafted(self) -> None:
        self.busy = False
        for id, one in self.known.items():
            if len(one.guesses) < one.ask:
                place = one.length + len(one.guesses)
                one.guesses.append(self._guess(id, place))
                self._send(1, self._came, id, one.lead, place, one.guesses[-1])
        self._work()

    def _guess(self, id: str, place: int) -> int:
        drawn = zlib.crc32(f"{id} {place}".encode()) / 2**32
        return truth(id, place) if drawn < self.world.accepted else (truth(id, place) + 1) % VOCABULARY

    # Here, as a client does

    def _came(self, id: str, lead: int, place: int, token: int) -> None:
        one = self.known.get(id)
        if one is None:
            return
        if lead > one.taken and place <= one.text:
            one.taken, one.begin, one.wrong, one.at_hand = lead, place, False, []
        if lead == one.taken and not one.wrong and place == one.begin + len(one.at_hand):
            one.at_hand.append(token)
            self._settle(id)
        if one.ready:
            one.since = None
        self.news.set()

    def _settle(self, id: str) -> None:
        one = self.known[id]
        came = [truth(id, place) for place in range(one.begin, one.text)]
        hits, met = right(one.at_hand, came), min(len(one.at_hand), len(came))
        one.judged = one.judged[0] + hits, one.judged[1] + (hits < met)
        one.wrong = one.wrong or hits < met
        one.begin, one.at_hand = one.begin + met, [] if one.wrong else one.at_hand[met:]

    def tell(self, asks: Sequence[DraftAsk]) -> None:
        for ask in asks:
            one = self.known.setdefault(ask.id, _Drafted())
            self._send(0, self._told, ask.id, len(ask.tokens), ask.k)
            one.text = len(ask.tokens)
            self._settle(ask.id)
            if one.ready or not ask.k:
                one.since = None
            elif one.since is None:
                one.since = self.loop.time()

    def ahead(self, id: str, length: int) -> Sequence[int]:
        one = self.known.get(id)
        return one.ready if one is not None and one.text == length else ()

    def judged(self, id: str) -> tuple[int, int]:
        self.looks += 1
        one = self.known.get(id, _Drafted())
        judged, one.judged = one.judged, (0, 0)
        return judged

    @property
    def delay_s(self) -> float:
        return (self.world.delay * (1 + self.world.jitter / 2) + self.world.draft) / 1e3

    def expected(self, id: str, count: int = 1) -> float:
        one = self.known[id]
        more = count - len(one.ready)
        if more <= 0:
            return 0.0
        if one.since is None:
            return more * self.world.draft / 1e3
        due = one.since + self.delay_s + (more - 1) * self.world.draft / 1e3
        return abs(due - self.loop.time()) + 1e-5

    async def arrived(self) -> None:
        self.news.clear()
        await self.news.wait()

    def forget(self, id: str) -> None:
        self.known.pop(id, None)


class Policy(Protocol):
    """Decides what a step verifies."""

    asked: int

    def begin(self, live: Live) -> object: ...
    def forget(self, live: Live) -> None: ...
    async def ask(self, decoding, idle): ...
    def learn(self, live: Live, drafted: int, accepted: int) -> None: ...
    def timed(self, seconds: float, runs) -> None: ...


@dataclass
class Never:
    """No drafts at all."""

    drafter: Drafter
    asked: int = 0

    def begin(self, live):
        pass

    def forget(self, live):
        pass

    async def ask(self, decoding, idle):
        return {}

    def learn(self, live, drafted, accepted):
        pass

    def timed(self, seconds, runs):
        pass


@dataclass
class Always(Never):
    """The naive form: up to `depth` drafts of each sequence in each step, from a drafter that is `ahead` tokens ahead.
    `waits`: each step waits for the first draft of each sequence, however long that takes."""

    depth: int = 4
    ahead: int = 4
    waits: bool = False

    def forget(self, live):
        self.drafter.forget(live.id)

    async def ask(self, decoding, idle):
        terms = DraftTerms(SamplingParams(1), PROMPT, frozenset())
        room = {live.ticket: min(self.depth, live.draftable) for live in decoding}
        asks = [DraftAsk(one.id, one.tokens, min(self.ahead, one.draftable), terms) for one in decoding]
        self.asked = sum(ask.k > 0 for ask in asks)
        self.drafter.tell(asks)
        while self.waits and any(room[one.ticket] and not self._at_hand(one) for one in decoding):
            await self.drafter.arrived()
        return {one.ticket: self._at_hand(one)[: room[one.ticket]] for one in decoding if room[one.ticket]}

    def _at_hand(self, live):
        return self.drafter.ahead(live.id, live.length)


def always(drafter: Drafter) -> list[Always]:
    """The naive policies, of which the best in hindsight is a measure of the mixture."""
    found = []
    for depth in (2, 8, 16):
        found += [Always(drafter, depth=depth, ahead=depth + more, waits=waits) for more, waits in _WAYS]
    return found


_WAYS = ((1, True), (1, False), (30, False), (8, True))


@dataclass(frozen=True)
class Phase:
    """So many tokens in one world."""

    world: World
    tokens: int


class Decoding:
    """Serves sequences of `answer` tokens, one after the other in each of the world's streams."""

    def __init__(self, loop, drafter: Drafter, policy: Policy, answer: int) -> None:
        self.loop, self.drafter, self.policy, self.answer = loop, drafter, policy, answer
        self.lives: list[Live] = []
        self.served = 0
        self.noise = Random(3)

    async def phase(self, phase: Phase) -> float:
        """Tokens per second."""
        self.drafter.world = phase.world
        began, tokens = self.loop.time(), 0
        while tokens < phase.tokens:
            while len(self.lives) < phase.world.sequences:
                self._begin()
            tokens += await self._step(phase.world)
        return tokens / (self.loop.time() - began)

    def _begin(self) -> None:
        ticket, self.served = self.served, self.served + 1
        prompt = tuple(truth(str(ticket), place) for place in range(PROMPT))
        live = new_live(Request(str(ticket), prompt, SamplingParams(self.answer)), ticket, frozenset())
        self.lives.append(live)
        self.policy.begin(live)

    async def _step(self, world: World) -> int:
        lives, policy, noise = self.lives, self.policy, world.noise
        drafts = await policy.ask(lives, lambda: None)
        seconds = world.seconds(len(lives), sum(map(len, drafts.values())), policy.asked)
        seconds *= self.noise.uniform(1 - noise, 1 + noise)
        seconds += HELD_UP / 1e3 * (self.noise.random() < world.held_up)
        await asyncio.sleep(seconds)
        made = 0
        for live in lives:
            live.computed = len(live.tokens) - 1
            live.run.aim(live.computed, 1, drafts.get(live.ticket, ()))
            came = [truth(live.id, len(live.tokens) + more) for more in range(world.most + 1)]
            hits = right(live.run.choice.drafts, came)
            policy.learn(live, len(live.run.choice.drafts), hits)
            live.tokens += came[: hits + 1]
            made += hits + 1
        policy.timed(seconds, [live.run for live in lives])
        for live in [one for one in lives if one.generated >= self.answer]:
            policy.forget(live)
            lives.remove(live)
        return made


def mixture(drafter: Drafter, most: int) -> Speculation:
    config = EngineConfig(model="made up", draft_tokens=most)
    return Speculation(config, VOCABULARY, drafter, None, None, counters=Counters())


def speeds(phases: Sequence[Phase], make, answer: int = 256) -> list[float]:
    """Tokens per second of each phase, with the policy that `make(drafter)` gives."""

    async def main(loop):
        drafter = Drafter(loop, phases[0].world)
        decoding = Decoding(loop, drafter, make(drafter), answer)
        return [await decoding.phase(phase) for phase in phases]

    return run(main)


def plain(world: World) -> float:
    """Tokens per second without drafts."""
    return world.sequences / (world.seconds(world.sequences, 0, 0) + world.held_up * HELD_UP / 1e3)


def best(world: World, tokens: int, answer: int = 256) -> float:
    """Tokens per second of the best policy that is the same for all steps; never to ask is one."""
    found = [plain(world)]
    for number in range(len(always(None))):
        found += speeds([Phase(world, tokens)], lambda drafter, number=number: always(drafter)[number], answer)
    return max(found)
