"""A drafter's part in drafting: for which sequences it drafts ahead, how far, and how long a step waits for it.

It is asked where its tokens are worth the rows that verify them and the time by which steps are longer while it works
on the same cores, as long as it has not cost more than it has saved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from math import ceil, log

from penstock.engine.hooks import DraftAsk, Drafter, DraftTerms
from penstock.engine.scheduling.live import Live
from penstock.engine.speculation.balance import Balance
from penstock.engine.speculation.costs import DraftCosts, HeldUp
from penstock.engine.speculation.depths import MARGIN, StepSeconds, best_count
from penstock.engine.speculation.guess import Guess
from penstock.engine.speculation.head.watched import WatchedStates, states_of
from penstock.engine.speculation.trust import DraftRate, Trust
from penstock.engine.stats import Counters

_TRIAL_EVERY, _LONGEST_TRIAL_EVERY, _TRIAL = 128, 512, 4
"""After how many steps it is asked for sequences, too, for which it seems not worth it, and for how many beside those
in which an answer comes. The first doubles while it is worth it for none."""
_LONGEST_TRIAL = 32
_BETWEEN_TRIALS = 96
"""Steps between two trials that bring nothing, at least, for each step of one, where that is twice as long beside a
drafter that works; fewer where it is less."""
_TRIAL_DEPTH, _TRIED = 4, 4
"""How many tokens are asked for in a trial, and for how many sequences: it computes the texts of all for which it is
asked."""
_CHECK_EVERY, _LONGEST_CHECK_EVERY, _CHECK = 64, 1024, 3
"""After how many steps beside a drafter that works it rests for how many. The first doubles each time."""
_LOOK_EVERY = 16
"""Steps between two looks at what it is worth, while that is nothing."""
_NEW, _LEAST_THERE = 0.03, 0.02
"""What the last sequence counts for in how many had drafts at hand, and the least share."""
_FARTHEST = 0.1
"""No token is asked for that is right less often."""
_SLACK_S = 0.0005
"""By which drafts may be later than expected, and half as late again."""


@dataclass(slots=True)
class Ahead:
    """What is known of a drafter for one sequence."""

    live: Live
    terms: DraftTerms
    trust: Trust = field(default_factory=Trust)
    watched: WatchedStates | None = None
    """What the model's layers said, if the drafter guesses from that."""
    depth: int = 0
    """Drafts that are worth verifying."""
    wanted: int = 0
    """Drafts that it was told are wanted: some more, for the next steps."""

    def ask(self) -> DraftAsk:
        """How far the sequence is, and what is wanted; with the states that were not told yet, if any is wanted."""
        states = states_of(*self.watched.take()) if self.wanted and self.watched and self.watched.waiting else None
        return DraftAsk(self.live.id, self.live.tokens, self.wanted, self.terms, states)

    @property
    def ready(self) -> bool:
        """Whether the drafter can guess behind the text, once it is told."""
        return self.watched is None or self.watched.ready(self.live.length)

    def feature(self, wanted: bool) -> None:
        """The next steps are to keep states for the drafter, or need not."""
        if self.watched is not None:
            self.live.run.featured = wanted
            if not wanted:
                self.watched.rest()

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

    def __init__(
        self, drafter: Drafter, costs: DraftCosts, counters: Counters, timeout_s: float, *, states: bool = False
    ) -> None:
        """A step waits for drafts for at most `timeout_s`. `states`: the drafter guesses from what the model's layers
        say."""
        self._drafter = drafter
        self.states = states
        self.asked = 0
        """Sequences for which it drafts during the step."""
        self._balance = Balance()
        self._held_up = HeldUp()
        self._costs = costs
        self._counters = counters
        self._timeout_s = timeout_s
        self._rate = DraftRate()
        self._there = 1.0
        """Share of the sequences for which it was asked whose drafts were at hand lately."""
        self._worth_it = True
        """For some sequence of the last step."""
        self._trial_every = _TRIAL_EVERY
        self._untried = 0
        """Steps since a trial began."""
        self._pause = 0
        """Steps from one trial to the next, at least."""
        self._trial = 0
        """Steps of a trial to come."""
        self._tried: Collection[int] = ()
        """Tickets of the sequences of the trial."""
        self._unseen = 0
        """Steps in a row in which nobody looked at what it is worth."""
        self._begun = False
        """A sequence has begun since somebody last looked."""
        self._steps = 0
        """Steps in a row beside which it worked."""
        self._check_every = _CHECK_EVERY
        self._check = 0
        """Steps for which it still rests, to learn what it costs."""
        self._after = 0
        """Steps to come in which it may work though it is not asked any more."""

    @property
    def open(self) -> bool:
        """Whether it may be asked: it has not cost more than it has saved."""
        return self._balance.open

    def wakes(self) -> bool:
        """Called once in each step: whether to look at what it is worth. While that was nothing, and it was asked for
        nothing, a look now and then is enough, and a step between costs nothing."""
        if self.asked:
            return True
        if not self.open:
            return False
        if self._worth_it or self._trial or self._begun:
            return True
        self._unseen += 1
        return self._unseen >= _LOOK_EVERY

    def begin(self, live: Live) -> Ahead:
        """Of a new sequence; the drafter can get ready, if it is worth it lately. `forget` ends it."""
        request = live.request
        terms = DraftTerms(
            request.sampling, len(request.prompt), live.stops, request.owner, request.session, request.seal
        )
        ahead = Ahead(live, terms, watched=WatchedStates() if self.states else None)
        self._begun = True
        if live.draftable and self.open and self._worth_it:
            ahead.feature(True)
            self._drafter.tell([ahead.ask()])
        return ahead

    def computed(self, ahead: Ahead) -> None:
        """A step has computed tokens of the sequence, and they are taken in."""
        run, live = ahead.live.run, ahead.live
        if ahead.watched is not None and run.features is not None:
            ahead.watched.watch(*run.told(live.computed))
            run.features = None
            if not self.open:
                ahead.feature(False)

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
        for ahead in sequences:
            ahead.feature(False)
        if self.asked:
            self._tell(sequences, [0] * len(sequences))

    def tell(self, sequences: Sequence[Ahead], rooms: Sequence[int], beside: StepBeside) -> None:
        """Says how far the sequences are, and how far it is to be ahead of them; `rooms` are the most drafts of each in
        a step. In a trial some are wanted of a few, whatever they are worth."""
        if beside.seconds.plain and not self._works(sequences, beside.seconds.plain):
            self.rest(sequences)
            return
        depths = [
            self._depth(ahead, room, beside, local)
            for ahead, room, local in zip(sequences, rooms, beside.local, strict=True)
        ]
        self._worth_it = any(depths)
        for ahead, room, depth in zip(sequences, rooms, depths, strict=True):
            tried = self._trial and ahead.live.ticket in self._tried
            ahead.depth = depth or (min(_TRIAL_DEPTH, room) if tried else 0)
            ahead.feature(ahead.depth > 0)
            if not ahead.ready:
                ahead.depth = 0  # it can guess behind the next step
        self._tell(sequences, [self._wanted(ahead, beside.seconds) for ahead in sequences])

    def _works(self, sequences: Sequence[Ahead], plain_s: float) -> bool:
        """Whether it may be asked in this step."""
        unseen, self._unseen, self._begun = self._unseen, 0, False
        if not self.open:
            return False
        self._untried += 1 + min(unseen, _LOOK_EVERY)
        self._trial = max(0, self._trial - 1)
        if self._untried >= max(self._trial_every, self._pause):
            self._trial_every = min(2 * self._trial_every, _LONGEST_TRIAL_EVERY)
            self._untried, self._trial = 0, min(_TRIAL + self._answer_steps(plain_s), _LONGEST_TRIAL)
            believed = nlargest(_TRIED, sequences, lambda ahead: ahead.trust.factor)
            self._tried = [ahead.live.ticket for ahead in believed]
            longer = self._costs.ahead(len(sequences)) / plain_s
            self._pause = round(_BETWEEN_TRIALS * min(1.0, longer) * self._trial)
        if self.asked:
            self._steps += 1
            if self._steps >= self._check_every:
                self._check, self._steps = _CHECK, 0
                self._check_every = min(2 * self._check_every, _LONGEST_CHECK_EVERY)
        self._check = max(0, self._check - 1)
        return not self._check

    def _answer_steps(self, plain_s: float) -> int:
        """In which an answer comes, twice as late as most do."""
        return ceil(2 * self._drafter.delay_s / plain_s)

    async def wait(self, sequences: Sequence[Ahead], beside: StepBeside, idle: Callable[[], None]) -> float:
        """Waits for drafts as long as that makes more tokens per second than to go on; calls `idle` before. Returns for
        how many seconds."""
        wait_s, awaited = self._worth_waiting(sequences, beside) if self.asked else (0.0, ())
        if not awaited:
            return 0.0
        idle()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(min(1.5 * wait_s + _SLACK_S, self._timeout_s)):
                while any(0 < self._expected(one) <= self._timeout_s for one in awaited):
                    await self._drafter.arrived()
        except TimeoutError:
            self._counters.draft_failures += 1
        waited_s = loop.time() - began
        self._balance.pay(waited_s)
        return waited_s

    def offer(self, ahead: Ahead, room: int) -> Guess:
        """What there is, up to `room` tokens."""
        if not ahead.wanted:
            return Guess()
        tokens = tuple(ahead.at_hand(self._drafter)[:room])
        self._there += _NEW * ((1.0 if tokens else _LEAST_THERE) - self._there)
        return self._guess(ahead, tokens)

    def took(self, seconds: float) -> None:
        """To look at what it is worth, and to tell it, has taken so long."""
        self._balance.pay(seconds)

    def brought(self, seconds: float) -> None:
        """Its drafts of a sequence have saved so many seconds."""
        self._balance.pay(-seconds)
        if seconds > 0:
            self._trial_every, self._pause = _TRIAL_EVERY, 0

    def stepped(self, seconds: float, step: StepSeconds, sequences: int, rows: int, others: int) -> None:
        """A step of so many sequences took `seconds` where `step` was expected. It verified `rows` of its drafts, and
        `others`. What has held a step up is not its doing."""
        if not step.plain:
            return
        self._after = min(self._answer_steps(step.plain), _LONGEST_TRIAL) if self.asked else max(0, self._after - 1)
        if self.asked or rows or self._after:
            expected_s = step.of(rows + others) + self._costs.ahead(sequences) * self.asked
            self._balance.pay(self._held_up.without(seconds, expected_s) - step.of(others))
        self._balance.step(step.plain)

    def _guess(self, ahead: Ahead, tokens: tuple[int, ...]) -> Guess:
        return ahead.trust.corrected(Guess(tokens, (self._rate.chance,) * len(tokens)))

    def _tell(self, sequences: Sequence[Ahead], wanted: Sequence[int]) -> None:
        asks = []
        for ahead, count in zip(sequences, wanted, strict=True):
            before, ahead.wanted = ahead.wanted, count
            if count or before:
                asks.append(ahead.ask())
        self.asked = sum(1 for count in wanted if count)
        if asks:
            self._drafter.tell(asks)

    def _depth(self, ahead: Ahead, room: int, beside: StepBeside, local: float) -> int:
        """How many of its tokens are worth verifying if they are at hand, beside `local` ones; 0: none. They have to be
        worth the steps, too, in which it was asked and none were at hand."""
        reach = self._guess(ahead, (0,) * room).reach
        more_s = self._costs.ahead(beside.sequences) / self._there
        return best_count(reach, beside.seconds, beside.sequences, MARGIN, instead=local, more_s=lambda count: more_s)

    def _wanted(self, ahead: Ahead, step: StepSeconds) -> int:
        """How far it should be ahead of the sequence: by the drafts of a step, those of the next one, and those by
        which the text goes on while an answer comes; 0: not at all. From states it guesses for the next step alone."""
        if not ahead.depth or self.states:
            return ahead.depth
        guess = self._guess(ahead, (0,) * ahead.depth)
        wanted = ahead.depth + round(ahead.depth * guess.reach[-1]) + 1
        if step.plain:
            passed = ceil((1 + guess.hope) * self._drafter.delay_s / step.of(ahead.depth))
            wanted = max(wanted, min(ahead.depth + passed, int(log(_FARTHEST) / log(guess.chances[0]))))
        return min(ahead.live.draftable, wanted)

    def _expected(self, ahead: Ahead) -> float:
        return self._drafter.expected(ahead.live.id, min(ahead.depth, ahead.wanted))

    def _worth_waiting(self, sequences: Sequence[Ahead], beside: StepBeside) -> tuple[float, Sequence[Ahead]]:
        """For how many seconds, and for whose drafts; for nobody's: it is not worth it. Steps may also go on while the
        drafts come, and find them a little later, if the text is as they begin until then."""
        asked = ((self._expected(one), at) for at, one in enumerate(sequences) if one.wanted)
        expected = sorted(one for one in asked if 0 < one[0] <= self._timeout_s)
        count, step = beside.sequences, beside.seconds
        awaited = [sequences[at] for _, at in expected]
        if not awaited or not step.plain:
            return max((wait_s for wait_s, _ in expected), default=0.0), awaited
        there = [self._guess(one, tuple(one.at_hand(self._drafter)[: one.depth])) for one in sequences]
        hopes = [max(guess.hope, local) for guess, local in zip(there, beside.local, strict=True)]
        now, now_s = count + sum(hopes), step.of(sum(len(guess.tokens) for guess in there))
        best_rate, best_s, best = (1 + MARGIN) * now / now_s, 0.0, 0
        gains: list[tuple[float, float]] = []
        rows = 0
        for wait_s, at in expected:
            full = self._guess(sequences[at], (0,) * sequences[at].depth)
            gains.append((max(0.0, full.hope - hopes[at]), full.chances[0]))
            rows += len(full.tokens) - len(there[at].tokens)
            rate = (now + sum(gain for gain, _ in gains)) / (wait_s + now_s + step.of(rows) - step.plain)
            plain_steps = ceil(max(0.0, wait_s - now_s) / step.plain)
            left = sum(gain * chance ** (1 + plain_steps) for gain, chance in gains)
            later_s = now_s + plain_steps * step.plain + step.of(rows)
            later_rate = (now + count * (plain_steps + 1) + left) / later_s
            if rate > max(best_rate, (1 + MARGIN) * later_rate):
                best_rate, best_s, best = rate, wait_s, len(gains)
        return best_s, awaited[:best]
