"""A draft head's part in drafting: for which sequences it guesses, and how far.

It can guess only once a step is over, as it needs what the layers said in it; so its time is added to the step's. It
guesses where that is worth it, and rests otherwise: then steps keep no states for it either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from penstock.engine.fit import LinearFit
from penstock.engine.scheduling.live import Live
from penstock.engine.speculation.ahead import StepBeside
from penstock.engine.speculation.depths import MARGIN, best_count
from penstock.engine.speculation.guess import NOTHING, Guess
from penstock.engine.speculation.head.guessing import HeadAsk, HeadGuesser, HeadView
from penstock.engine.speculation.trust import DraftRate, Trust
from penstock.engine.stats import Counters

_PAUSE, _LONGEST_PAUSE = 64, 1024
"""Steps for which it rests for a sequence for which it was not worth it: at first, and at most. They double."""
_TRIAL, _TRIAL_DEPTH = 2, 3
"""Steps for which it guesses then, whatever is known of it; and how far."""
_TRIAL_SHARE = 0.01
"""What trials may take of the time; where they would take more, it rests for longer."""
_FIRST_CALLS = 3
"""Calls in which it guesses one token, then two, and so on, to learn what it costs."""
_UNITS = (1.0, 16.0, 4.0)
"""Of a call, of the rows that it computes, and of its steps."""
_log = logging.getLogger(__name__)

Compute = Callable[[Sequence[Live], Callable[[], list[Guess]], Callable[[], object]], Awaitable[list[Guess]]]
"""Calls a function beside the steps of some sequences, in the thread that computes these and in its turn; calls another
one on the loop once that has begun."""


@dataclass(eq=False, slots=True)
class Headed:
    """What is known of the head for one sequence."""

    live: Live
    watched: HeadView = field(default_factory=HeadView)
    trust: Trust = field(default_factory=Trust)
    begin: int = 0
    """Where the last guess begins."""
    guess: Guess = NOTHING
    """For the next step, with the head's own chances."""
    trial: int = 0
    pause: int = _PAUSE
    resting: int = 0
    """Steps for which it rests."""

    @property
    def believed(self) -> Guess:
        """The guess with the chances that are believed."""
        return self.trust.corrected(self.guess)

    @property
    def ready(self) -> bool:
        """Whether the head has seen all that it needs."""
        return self.watched.ready(self.live.length)

    def rest(self) -> None:
        """The next steps keep no states for it."""
        self.live.run.featured = False
        self.watched.rest()


class Heading:
    """An engine's head, and what is known of it."""

    def __init__(self, guesser: HeadGuesser, compute: Compute, counters: Counters, *, always: bool) -> None:
        """`always`: it guesses whatever that costs."""
        self._guesser = guesser
        self._compute = compute
        self._counters = counters
        self._always = always
        self._costs = LinearFit(_UNITS)
        self._rates: list[DraftRate] = []
        """By place of a token in a guess."""
        self._calls = 0
        self._broken = False

    def begin(self, live: Live) -> Headed:
        """Of a new sequence."""
        live.run.featured = not self._broken
        return Headed(live)

    def rest(self, sequences: Sequence[Headed]) -> None:
        """No draft can pay now: the next steps keep no states either."""
        for headed in sequences:
            headed.rest()

    def computed(self, headed: Headed) -> None:
        """A step has computed tokens of the sequence, and they are taken in."""
        run, live = headed.live.run, headed.live
        if run.features is not None:
            headed.watched.watch(*run.told(live.computed))
            run.features = None

    def look_back(self, sequences: Sequence[Headed]) -> None:
        """Learns from what came of its last guesses, verified or not."""
        for headed in sequences:
            guess, headed.guess = headed.guess, NOTHING
            came = headed.live.tokens[headed.begin : headed.begin + len(guess.tokens)]
            headed.trust.learn(guess, came)
            for place, (guessed, real) in enumerate(zip(guess.tokens, came, strict=False)):
                self._rate(place).learn(int(guessed == real), int(guessed != real))
                if guessed != real:
                    break

    async def guess(
        self, sequences: Sequence[Headed], rooms: Sequence[int], beside: StepBeside, idle: Callable[[], None]
    ) -> None:
        """Sets `guess` of those for which that is worth it; `rooms` are the most tokens of each."""
        counts = [
            0 if self._broken else self._depth(headed, room, beside, local)
            for headed, room, local in zip(sequences, rooms, beside.local, strict=True)
        ]
        chosen = [(headed, count) for headed, count in zip(sequences, counts, strict=True) if count]
        if not chosen:
            return
        lives = [headed.live for headed, _ in chosen]
        asks = [HeadAsk(one.watched, one.live.tokens, count, one.live.run.choice) for one, count in chosen]
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            guesses = await self._compute(lives, lambda: self._guesser.guess(asks), idle)
        except Exception:
            _log.exception("the draft head failed; it guesses no more")
            self._broken = True
            self._counters.draft_failures += 1
            for headed in sequences:
                headed.rest()
            return
        self._calls += 1
        self._costs.add(loop.time() - began, (1.0, self._guesser.rows, self._guesser.steps))
        for (headed, _), guess in zip(chosen, guesses, strict=True):
            headed.begin, headed.guess = headed.live.length, guess

    def _depth(self, headed: Headed, room: int, beside: StepBeside, local: float) -> int:
        """How many tokens to guess of the sequence; 0: none."""
        if self._always:
            return room if headed.ready else 0
        if not (headed.live.run.featured or headed.resting):
            headed.live.run.featured = True  # it can guess behind the next step
            return 0
        if headed.resting:
            headed.resting -= 1
            if not headed.resting:
                headed.live.run.featured, headed.trial = True, _TRIAL
            return 0
        if not (headed.ready and room):
            return 0
        depth = self._worth(headed, room, beside, local)
        if depth:
            headed.pause = _PAUSE
        elif headed.trial:
            headed.trial -= 1
            depth = min(_TRIAL_DEPTH, room)
        else:
            headed.resting = max(headed.pause, self._least_pause(beside))
            headed.pause = min(2 * headed.pause, _LONGEST_PAUSE)
            headed.rest()
        return min(depth, 1 + self._calls) if self._calls < _FIRST_CALLS else depth

    def _least_pause(self, beside: StepBeside) -> int:
        """Steps between two trials, so that these take no more than their share."""
        trial_s = _TRIAL * self._seconds(_TRIAL_DEPTH, 1)
        return round(trial_s / (_TRIAL_SHARE * beside.seconds.plain)) if beside.seconds.plain else 0

    def _seconds(self, depth: int, sequences: int) -> float:
        """Of one sequence's guess: its share of a call for so many, which is shared by all, and its own rows."""
        call, row, step = self._costs.known
        return (call + step * depth) / sequences + row * 2 * depth

    def _worth(self, headed: Headed, room: int, beside: StepBeside, local: float) -> int:
        """How many tokens to guess for most tokens per second, beside the `local` ones that cost nothing more."""
        reach = Guess((0,) * room, tuple(self._rate(place).chance for place in range(room)))
        return best_count(
            headed.trust.corrected(reach).reach,
            beside.seconds,
            beside.sequences,
            MARGIN,
            instead=local,
            more_s=lambda count: self._seconds(count, beside.sequences),
        )

    def _rate(self, place: int) -> DraftRate:
        while len(self._rates) <= place:
            self._rates.append(DraftRate())
        return self._rates[place]
