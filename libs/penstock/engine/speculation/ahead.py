"""A drafter's part in drafting: for which sequences it drafts ahead, how far, and how long a step waits for it.

It is asked where what it brings is worth what it costs: the rows that verify, the time that steps wait, and the time by
which they are longer while it works on the same cores. What it costs is learned from steps beside which it rests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.engine.hooks import DraftAsk, Drafter, DraftTerms
from penstock.engine.scheduling.live import Live
from penstock.engine.speculation.costs import DraftCosts
from penstock.engine.speculation.depths import MARGIN, StepSeconds, best_count
from penstock.engine.speculation.guess import Guess
from penstock.engine.speculation.trust import DraftRate, Trust
from penstock.engine.stats import Counters

_PAUSE, _LONGEST_PAUSE = 64, 1024
"""Steps for which a drafter that was not worth it is not asked for a sequence: at first, and at most. They double."""
_TRIAL = 3
"""Steps for which it is asked then, whatever is known of it."""
_TRIAL_DEPTH = 4
_LEAST = 0.1
"""By how much it has to raise the tokens per second to be asked, as a share: what it costs is known less well than the
cost of drafts at hand."""
_CHECK_EVERY, _CHECK = 64, 3
"""After how many steps beside a drafter that works it rests for how many. The first doubles each time."""
_SLACK_S = 0.0005
"""By which drafts may be later than expected, and half as late again."""
_NEW = 0.1
"""What the last step weighs in an average."""


@dataclass(slots=True)
class Ahead:
    """What is known of a drafter for one sequence."""

    live: Live
    terms: DraftTerms
    supply: float
    """How much of what is hoped of the drafter has been at hand lately."""
    trust: Trust = field(default_factory=Trust)
    depth: int = 0
    """Drafts that are worth verifying."""
    wanted: int = 0
    """Drafts that it was told are wanted: some more, for the next step."""
    trial: int = 0
    """Steps for which it is still asked whatever is known of it."""
    pause: int = _PAUSE
    resting: int = 0
    """Steps for which it is not asked."""

    @property
    def ask(self) -> DraftAsk:
        """How far the sequence is, and what is wanted."""
        return DraftAsk(self.live.id, self.live.tokens, self.wanted, self.terms)

    def at_hand(self, drafter: Drafter) -> Sequence[int]:
        """The drafter's tokens that go on from the text, once it was told."""
        return drafter.ahead(self.live.id, self.live.length)


@dataclass(frozen=True, slots=True)
class StepBeside:
    """A step that is about to be planned."""

    sequences: int
    seconds: StepSeconds
    local: Sequence[float]
    """By sequence, how many tokens its drafts bring without the drafter."""


class RunningAhead:
    """An engine's drafter, and what is known of it."""

    def __init__(self, drafter: Drafter, costs: DraftCosts, counters: Counters, timeout_s: float) -> None:
        """A step waits for drafts for at most `timeout_s`."""
        self._drafter = drafter
        self.asked = 0
        """Sequences for which it drafts during the step."""
        self._costs = costs
        self._counters = counters
        self._timeout_s = timeout_s
        self._rate = DraftRate()
        self._supply = 1.0
        """As of a sequence, over all."""
        self._wait_s = 0.0
        """Seconds for which steps wait, on average."""
        self._steps = 0
        """Steps in a row beside which it worked."""
        self._check_every = _CHECK_EVERY
        self._check = 0
        """Steps for which it still rests, to learn what it costs."""

    def begin(self, live: Live) -> Ahead:
        """Of a new sequence; the drafter can get ready. `forget` ends it."""
        request = live.request
        terms = DraftTerms(request.sampling, len(request.prompt), live.stops, request.owner, request.session)
        ahead = Ahead(live, terms, self._supply)
        if live.draftable:
            self._drafter.tell([ahead.ask])
        return ahead

    def forget(self, live: Live) -> None:
        """The sequence has ended."""
        self._drafter.forget(live.id)

    def look_back(self, sequences: Sequence[Ahead]) -> None:
        """Learns from what came of its tokens. What was wrong before anybody could use it counts too: else a drafter
        that runs ahead would be known by its right tokens alone."""
        for ahead in sequences:
            right, wrong = self._drafter.judged(ahead.live.id)
            if right or wrong:
                self._rate.learn(right, wrong)
                ahead.trust.count(self._rate.chance, right, wrong)

    def rest(self, sequences: Sequence[Ahead]) -> None:
        """It is not asked for this step."""
        if self.asked:
            self._tell(sequences, [0] * len(sequences))

    def tell(self, sequences: Sequence[Ahead], rooms: Sequence[int], beside: StepBeside) -> None:
        """Says how far the sequences are, and how far it is to be ahead of them; `rooms` are the most that it can."""
        self._wait_s *= 1 - _NEW
        if self.asked:
            self._steps += 1
            if self._steps >= self._check_every:
                self._check, self._steps = _CHECK, 0
                self._check_every = min(2 * self._check_every, _LONGEST_PAUSE)
        if self._check and beside.seconds.plain:
            self._check -= 1
            self.rest(sequences)
            return
        wanted = [
            self._wanted(ahead, room, beside, local)
            for ahead, room, local in zip(sequences, rooms, beside.local, strict=True)
        ]
        self._tell(sequences, wanted)

    async def wait(self, sequences: Sequence[Ahead], beside: StepBeside, idle: Callable[[], None]) -> float:
        """Waits for drafts as long as that makes more tokens per second than to go on; calls `idle` before. Returns for
        how many seconds."""
        wait_s = self._worth_waiting(sequences, beside) if self.asked else 0.0
        if not wait_s:
            return 0.0
        idle()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(min(1.5 * wait_s + _SLACK_S, self._timeout_s)):
                while any(0 < self._expected(one) <= self._timeout_s for one in sequences if one.wanted):
                    await self._drafter.arrived()
        except TimeoutError:
            self._counters.draft_failures += 1
        waited_s = loop.time() - began
        self._wait_s += _NEW * waited_s
        return waited_s

    def offer(self, ahead: Ahead, room: int) -> Guess:
        """What there is, up to `room` tokens."""
        if not ahead.wanted:
            return Guess()
        tokens = tuple(ahead.at_hand(self._drafter)[:room])
        full = self._guess(ahead, (0,) * min(ahead.wanted, room))
        offered = self._guess(ahead, tokens)
        share = min(1.0, offered.hope / full.hope) if full.hope else 0.0
        ahead.supply += _NEW * (share - ahead.supply)
        self._supply += _NEW / 4 * (share - self._supply)
        return offered

    def _guess(self, ahead: Ahead, tokens: tuple[int, ...]) -> Guess:
        return ahead.trust.corrected(Guess(tokens, (self._rate.chance,) * len(tokens)))

    def _tell(self, sequences: Sequence[Ahead], wanted: Sequence[int]) -> None:
        asks = []
        for ahead, count in zip(sequences, wanted, strict=True):
            before, ahead.wanted = ahead.wanted, count
            if count or before:
                asks.append(ahead.ask)
        self.asked = sum(1 for count in wanted if count)
        if asks:
            self._drafter.tell(asks)

    def _wanted(self, ahead: Ahead, room: int, beside: StepBeside, local: float) -> int:
        """How far it should be ahead of the sequence; 0: not at all."""
        if ahead.resting:
            ahead.resting -= 1
            ahead.trial = 0 if ahead.resting else _TRIAL
            return 0
        guess = self._guess(ahead, (0,) * room)
        more_s = self._costs.ahead(beside.sequences) + self._wait_s
        reach = [chance * ahead.supply for chance in guess.reach]
        depth = best_count(reach, beside.seconds, beside.sequences, _LEAST, instead=local, more_s=lambda count: more_s)
        if depth:
            ahead.pause = _PAUSE
        elif ahead.trial:
            ahead.trial -= 1
            depth = min(_TRIAL_DEPTH, room)
        else:
            ahead.resting, ahead.pause = ahead.pause, min(2 * ahead.pause, _LONGEST_PAUSE)
        ahead.depth = depth
        if not depth:
            return 0
        return min(ahead.live.draftable, depth + round(depth * guess.reach[depth - 1]) + 1)

    def _expected(self, ahead: Ahead) -> float:
        return self._drafter.expected(ahead.live.id, min(ahead.depth, ahead.wanted))

    def _worth_waiting(self, sequences: Sequence[Ahead], beside: StepBeside) -> float:
        """Seconds; 0: it is not worth it."""
        asked = ((self._expected(one), at) for at, one in enumerate(sequences) if one.wanted)
        expected = sorted(one for one in asked if 0 < one[0] <= self._timeout_s)
        if not beside.seconds.plain:
            return max((wait_s for wait_s, _ in expected), default=0.0)
        tokens = float(beside.sequences)
        best_rate, best, rows = (1 + MARGIN) * tokens / beside.seconds.plain, 0.0, 0
        for wait_s, at in expected:
            one = sequences[at]
            there = self._guess(one, (0,) * min(one.depth, len(one.at_hand(self._drafter)))).hope
            rows += one.depth
            tokens += max(0.0, self._guess(one, (0,) * one.depth).hope - max(there, beside.local[at]))
            rate = tokens / (beside.seconds.of(rows) + wait_s)
            if rate > best_rate:
                best_rate, best = rate, wait_s
        return best
