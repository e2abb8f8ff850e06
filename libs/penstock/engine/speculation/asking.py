"""Asks all proposers for drafts, and settles how many of whose a step verifies.

A step without drafts is always a choice, and costs nothing then: where no draft could raise the tokens per second no
proposer is asked. Guesses are compared with what came whether they were verified or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from penstock.engine.config import EngineConfig
from penstock.engine.hooks import Drafter
from penstock.engine.scheduling.live import Live
from penstock.engine.speculation.ahead import Ahead, RunningAhead, StepBeside
from penstock.engine.speculation.costs import DraftCosts
from penstock.engine.speculation.depths import FREE, MARGIN, StepSeconds, depths
from penstock.engine.speculation.guess import NOTHING, Guess
from penstock.engine.speculation.heading import Headed, Heading
from penstock.engine.speculation.looking import Looked, Looking
from penstock.engine.speculation.lookup.lookup import Lookup
from penstock.engine.stats import Counters
from penstock.engine.step.run import Run
from penstock.grammar.matcher import GrammarLeft
from penstock.runtime.drafts import GRAMMAR, HEAD, LOOKUP, MODEL, DraftAccount

_FIRST_STEPS = 4
"""Steps without drafts before any, to know what they take."""
_TRIAL_EVERY, _LONGEST_PAUSE = 64, 1024
"""Decoding steps without drafts after which some are verified, to learn what they cost now: at first, and at most. They
double."""
_TRIAL_DRAFTS, _TRIAL_STEPS = 4, 16
"""How many, and for how many steps they are looked for; a drafter's until it has a trial."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """The drafts of one sequence."""

    proposer: str = GRAMMAR
    guess: Guess = NOTHING
    forced: int = 0
    """How many leading ones its grammar forces."""
    instead: float = 0.0
    """Tokens that are hoped for without it, where it is the drafter's."""


_NONE = _Choice()


@dataclass(frozen=True, slots=True)
class AskedFor:
    """What was known of a step when drafts for it were asked for."""

    step: StepSeconds
    rows: int
    """Drafts of the drafter that it verifies."""
    taking_part: bool
    """Some of its sequences take part in drafts."""


@dataclass(slots=True)
class _Writer:
    """A sequence, and what is known of its proposers."""

    live: Live
    ahead: Ahead | None
    headed: Headed | None
    looked: Looked
    account: DraftAccount = field(default_factory=DraftAccount)
    choice: _Choice = _NONE
    """Of the last step."""

    @property
    def guessed(self) -> bool:
        """Whether there is anything to choose from, without a drafter and a head."""
        return bool(self.looked.guess.tokens) or self.live.guide is not None

    @property
    def silent(self) -> bool:
        """Whether there is nothing to choose from."""
        return not self.guessed and self.headed is None and not (self.ahead is not None and self.ahead.wanted)


class Speculation:
    """The proposers of an engine: grammars that force tokens, its lookup, its drafter and its head if it has them.

    What a drafter says is never trusted, and it is waited for as long as what it is expected to bring is worth: when it
    is late or away, the step runs without its drafts.
    """

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        drafter: Drafter | None,
        lookup: Lookup | None,
        heading: Heading | None,
        *,
        counters: Counters,
    ) -> None:
        self._most = config.draft_tokens
        self._always = config.draft_always
        self._vocab_size = vocab_size
        self._counters = counters
        self._costs = DraftCosts()
        self._looking = None if lookup is None else Looking(lookup)
        self._heading = heading
        self._ahead = None
        if drafter is not None and self._most:
            self._ahead = RunningAhead(
                drafter, self._costs, counters, config.draft_timeout_s, states=config.tells_states
            )
        self._writers: dict[int, _Writer] = {}
        """By ticket."""
        self._plain_steps = 0
        """Decoding steps since the last one with drafts, or since some were looked for."""
        self._patience = _TRIAL_EVERY
        self._step = FREE
        """What is expected of the step."""
        self._token_s = 0.0
        """Seconds of the step for each token that is hoped for without the drafter."""
        self._rows = 0
        """Drafts of the drafter that the step verifies."""
        self._taking_part = True
        """Some sequence of the step takes part in drafts."""

    @property
    def asked_for(self) -> AskedFor:
        """Of the step that comes next."""
        return AskedFor(self._step, self._rows, self._taking_part)

    @property
    def asked(self) -> int:
        """Sequences for which the drafter drafts during the step."""
        return 0 if self._ahead is None else self._ahead.asked

    @property
    def lookup_defects(self) -> int:
        """Texts that the lookup could not take in."""
        return 0 if self._looking is None else self._looking.defects

    def begin(self, live: Live) -> DraftAccount:
        """The account of a new sequence; ends with `forget`."""
        ahead = headed = None
        if live.request.sampling.drafts:
            ahead = None if self._ahead is None else self._ahead.begin(live)
            headed = None if self._heading is None else self._heading.begin(live)
        looked = Looked() if self._looking is None else self._looking.begin()
        self._writers[live.ticket] = writer = _Writer(live, ahead, headed, looked)
        return writer.account

    def forget(self, live: Live) -> None:
        """Forgets a sequence that has ended, here and in the proposers."""
        writer = self._writers.pop(live.ticket, None)
        if writer is not None and self._looking is not None and live.request.sampling.drafts:
            self._looking.forget(live, writer.looked)
        if writer is not None and writer.ahead is not None and self._ahead is not None:
            self._ahead.forget(live)

    def computed(self, step: Sequence[Live]) -> None:
        """A step has computed tokens of these sequences, and they are taken in."""
        if self._heading is None and not (self._ahead is not None and self._ahead.states):
            return
        for live in step:
            writer = self._writers.get(live.ticket)
            if writer is None:
                continue
            if self._heading is not None and writer.headed is not None:
                self._heading.computed(writer.headed)
            elif self._ahead is not None and writer.ahead is not None:
                self._ahead.computed(writer.ahead)

    async def ask(self, decoding: Sequence[Live], idle: Callable[[], None]) -> Mapping[int, tuple[int, ...]]:
        """Drafts by ticket, for sequences whose next step is a decode step. Calls `idle` before it waits for any."""
        if not decoding or not self._most:
            return {}
        count = len(decoding)
        self._taking_part = any(live.request.sampling.drafts for live in decoding)
        writers = [self._writers[live.ticket] for live in decoding]
        self._step = step = FREE if self._always else self._costs.step(count, sum(live.length for live in decoding))
        self._rows = 0
        trial = self._plain_steps >= self._patience
        new = self._costs.steps(count) < _FIRST_STEPS
        awake = self._ahead is not None and (self._always or self._ahead.wakes())
        if not self._always and (
            new or not (trial or step.pays(count, count * self._most)) or not self._may_propose(decoding, awake)
        ):
            self._rest(writers)
            return {}
        self._look(writers, step)
        if awake:
            await self._run_ahead(writers, step, idle)
        await self._head(writers, step, idle)
        if not (trial or awake or self._heading) and not any(writer.guessed for writer in writers):
            for writer in writers:
                self._settle(writer, _NONE, 0)
            return {}
        choices = [self._chosen(writer) for writer in writers]
        reaches = [choice.guess.reach for choice in choices]
        lengths = depths(reaches, step, MARGIN)
        if any(lengths):
            self._patience = _TRIAL_EVERY
        elif trial:
            lengths = _some(reaches)
            coming = self._ahead is not None and self._ahead.open  # in the drafter's next trial
            if any(lengths) or (not coming and self._plain_steps >= self._patience + _TRIAL_STEPS):
                self._patience, self._plain_steps = min(2 * self._patience, _LONGEST_PAUSE), 0
        drafts: dict[int, tuple[int, ...]] = {}
        for writer, choice, length in zip(writers, choices, lengths, strict=True):
            self._settle(writer, choice, length)
            if length:
                drafts[writer.live.ticket] = choice.guess.tokens[:length]
                if choice.proposer == MODEL:
                    self._rows += max(0, length - choice.forced)
        return drafts

    def _settle(self, writer: _Writer, choice: _Choice, length: int) -> None:
        """So many drafts of the choice are verified."""
        writer.choice = choice
        if self._looking is not None:
            self._looking.settle(writer.looked, bool(length))

    def learn(self, live: Live, drafted: int, accepted: int) -> Sequence[str]:
        """A step verified `drafted` drafts of the sequence and accepted the first `accepted` of them. Says whose those
        were."""
        writer = self._writers.get(live.ticket)
        if writer is None:
            return ()
        forced = min(writer.choice.forced, drafted)
        for account in (writer.account, self._counters.drafts):
            account.count(((GRAMMAR, forced), (writer.choice.proposer, drafted - forced)), accepted)
        if self._ahead is not None and writer.choice.proposer == MODEL:
            self._ahead.brought(self._token_s * (accepted - writer.choice.instead))
        return ([GRAMMAR] * forced + [writer.choice.proposer] * (drafted - forced))[:accepted]

    def timed(self, seconds: float, runs: Sequence[Run], asked: AskedFor | None = None) -> None:
        """A step of these runs, none of them of a prompt, took `seconds`; None: none was asked about since."""
        drafts, asked = sum(run.tokens - run.known for run in runs), asked or self.asked_for
        if asked.taking_part:
            self._plain_steps = 0 if drafts else self._plain_steps + 1
            if self._ahead is not None:
                self._ahead.stepped(seconds, asked.step, len(runs), asked.rows, drafts - asked.rows)
        self._costs.learn(seconds, len(runs), sum(run.start for run in runs), drafts, self.asked)

    def _may_propose(self, decoding: Sequence[Live], awake: bool) -> bool:
        """Whether there may be any drafts; `awake`: of the drafter too."""
        if not any(live.draftable for live in decoding):
            return False
        if awake or self._looking is not None or self._heading is not None:
            return True
        return any(live.guide is not None for live in decoding)

    def _rest(self, writers: Sequence[_Writer]) -> None:
        if self._ahead is not None:
            self._ahead.rest(_aheads(writers))
        if self._heading is not None:
            self._heading.rest(_headed(writers))

    def _look(self, writers: Sequence[_Writer], step: StepSeconds) -> None:
        if self._looking is None:
            return
        token_s = step.plain / len(writers) if step.plain else inf
        self._looking.step()
        for writer in writers:
            live = writer.live
            self._looking.look_back(live, writer.looked)
            if not self._looking.due(writer.looked, token_s):
                continue
            forced = self._forced(live)
            if room := self._room(live) - len(forced):
                self._looking.look(live, writer.looked, forced, room)

    async def _run_ahead(self, writers: Sequence[_Writer], step: StepSeconds, idle: Callable[[], None]) -> None:
        assert self._ahead is not None, "it is awake"
        loop = asyncio.get_running_loop()
        began = loop.time()
        sequences = _aheads(writers)
        beside = self._beside(writers, step)
        self._token_s = step.plain / (len(writers) + sum(beside.local))
        self._ahead.look_back(sequences)
        self._ahead.tell(sequences, self._rooms(writers), beside)
        self._ahead.took(loop.time() - began)
        waited_s = await self._ahead.wait(sequences, beside, idle)
        for account in (self._counters.drafts, *(writer.account for writer in writers)):
            account.waited_s += waited_s

    async def _head(self, writers: Sequence[_Writer], step: StepSeconds, idle: Callable[[], None]) -> None:
        if self._heading is None:
            return
        sequences = _headed(writers)
        self._heading.look_back(sequences)
        await self._heading.guess(sequences, self._rooms(writers), self._beside(writers, step), idle)

    def _beside(self, writers: Sequence[_Writer], step: StepSeconds) -> StepBeside:
        drafting = _drafting(writers)
        local = [len(self._forced(writer.live)) + writer.looked.believed.hope for writer in drafting]
        return StepBeside(len(writers), step, local)

    def _rooms(self, writers: Sequence[_Writer]) -> list[int]:
        return [self._room(writer.live) for writer in _drafting(writers)]

    def _chosen(self, writer: _Writer) -> _Choice:
        """The drafts from which most is hoped. What a grammar forces comes first, and what it forbids is left out."""
        if writer.silent:
            return _NONE
        forced, room = self._forced(writer.live), self._room(writer.live)
        sure = Guess(forced, (1.0,) * len(forced))
        options = [_Choice(GRAMMAR, sure, len(forced))]
        looked = writer.looked.believed
        if looked.tokens:
            options.append(_Choice(LOOKUP, self._legal(writer.live, _joined(sure, looked)), len(forced)))
        if self._ahead is not None and writer.ahead is not None:
            instead = max(map(_hope, options))
            offered = self._option(MODEL, writer, self._usable(self._ahead.offer(writer.ahead, room)), sure)
            options += [replace(option, instead=instead) for option in offered]
        if writer.headed is not None:
            options += self._option(HEAD, writer, writer.headed.believed, sure)
        return max(options, key=_hope)

    def _option(self, proposer: str, writer: _Writer, guess: Guess, sure: Guess) -> Sequence[_Choice]:
        """What a proposer guesses that does not know of the tokens that are `sure`, if it guesses these too."""
        forced = len(sure.tokens)
        if not guess.tokens or guess.tokens[:forced] != sure.tokens:
            return ()
        rest = Guess(guess.tokens[forced:], guess.chances[forced:])
        return (_Choice(proposer, self._legal(writer.live, _joined(sure, rest)), forced),)

    def _legal(self, live: Live, guess: Guess) -> Guess:
        if live.guide is None:
            return guess
        try:
            return guess.cut(len(live.guide.legal(guess.tokens)))
        except GrammarLeft:  # its next mask says so to the request
            return NOTHING

    def _room(self, live: Live) -> int:
        """Most drafts of the sequence for a step."""
        return min(self._most, live.draftable)

    def _forced(self, live: Live) -> tuple[int, ...]:
        """What the sequence's grammar forces next, as far as it may be drafted."""
        return () if live.guide is None else live.guide.forced[: self._room(live)]

    def _usable(self, guess: Guess) -> Guess:
        """Up to the first entry that is not a token."""
        for place, token in enumerate(guess.tokens):
            if not isinstance(token, int) or not 0 <= token < self._vocab_size:
                return guess.cut(place)
        return guess


def _drafting(writers: Sequence[_Writer]) -> list[_Writer]:
    """Those that are drafted for."""
    return [writer for writer in writers if writer.live.request.sampling.drafts]


def _aheads(writers: Sequence[_Writer]) -> list[Ahead]:
    return [writer.ahead for writer in writers if writer.ahead is not None]


def _headed(writers: Sequence[_Writer]) -> list[Headed]:
    return [writer.headed for writer in writers if writer.headed is not None]


def _hope(choice: _Choice) -> float:
    return choice.guess.hope


def _joined(one: Guess, other: Guess) -> Guess:
    return Guess(one.tokens + other.tokens, one.chances + other.chances) if one.tokens else other


def _some(reaches: Sequence[Sequence[float]]) -> list[int]:
    """A few drafts, to learn what they cost: of the sequence for which most is hoped."""
    lengths = [0] * len(reaches)
    at = max(range(len(reaches)), key=lambda at: sum(reaches[at]))
    lengths[at] = min(_TRIAL_DRAFTS, len(reaches[at]))
    return lengths
