"""All that a router knows and others may know too: the one interface between planning, which never waits, and whoever
carries it between routers and across restarts.

The planner tells what has changed; a carrier takes it later, as it is then, so that what changes often is told once.
What others tell is put where the planner looks.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.router.ledger import Ledger
from penstock.router.lengths import OutputLengths
from penstock.router.others import Booking, OthersBookings
from penstock.router.registry import Registry, Seat
from penstock.router.sessions import Recent, SessionHome
from penstock.router.shared.records import (
    AnswerFact,
    BeliefFact,
    BookingFact,
    Fact,
    FreedFact,
    HomeFact,
    LengthsFact,
    Record,
)

Name = TypeVar("Name", bound=Hashable)
_MOST_ANSWERS = 4096
"""Answers that wait to be told; beyond that the oldest are told by the lengths alone."""
_MOST_BELIEFS = 4096
_MOST_NAMES = 100_000
"""Of sessions, lengths and members each that wait to be told; beyond that the oldest are not."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed and was taken to be told."""

    facts: Sequence[Fact] = ()
    """For routers that run."""
    records: Sequence[tuple[Record, float]] = ()
    """For those that will: with the time of each, by the planner's clock."""


@dataclass(slots=True)
class _Told:
    """What has changed since it was last taken: names, not values."""

    bookings: set[int] = field(default_factory=set)
    homes: OrderedDict[tuple[str, str], None] = field(default_factory=OrderedDict)
    lengths: OrderedDict[tuple[str, ...], None] = field(default_factory=OrderedDict)
    members: OrderedDict[str, None] = field(default_factory=OrderedDict)
    answers: deque[AnswerFact] = field(default_factory=lambda: deque(maxlen=_MOST_ANSWERS))


class Commons:
    """Owner of nothing but the list of changes; the parts belong to the planner."""

    def __init__(
        self,
        *,
        homes: Recent[tuple[str, str], SessionHome],
        lengths: OutputLengths,
        registry: Registry,
        ledger: Ledger,
        clock: Callable[[], float],
    ) -> None:
        self.others = OthersBookings()
        self.carried = False
        """Whether anybody takes what changes; else it is not noted."""
        self._booked = False
        """Whether somebody has all bookings, and needs to hear only of changes."""
        self.stirred = asyncio.Event()
        """Set as long as there is something to take."""
        self._homes = homes
        self._lengths = lengths
        self._registry = registry
        self._ledger = ledger
        self._clock = clock
        self._beliefs: Recent[str, BeliefFact] = Recent(_MOST_BELIEFS, 3600.0)
        """Of members that have not joined here yet."""
        self._told = _Told()

    # The planner's side.

    def charged(self, number: int) -> None:
        """A plan was charged, its charge has changed, or was given back."""
        if self._booked:
            self._told.bookings.add(number)
            self.stirred.set()

    def placed(self, model: str, session: str) -> None:
        """A session has another home, or the same again."""
        if self.carried:
            _note(self._told.homes, (model, session))
            self.stirred.set()

    def answered(self, names: tuple[str, str, str], tokens: int, *, ended: bool) -> None:
        """An answer of a model, tenant and session was learned from."""
        if self.carried:
            self._told.answers.append(AnswerFact(*names, tokens, ended))
            for key in self._lengths.keys(names):
                _note(self._told.lengths, key)
            self.stirred.set()

    def judged(self, member: str) -> None:
        """Something else is believed of a worker."""
        if self.carried:
            _note(self._told.members, member)
            self.stirred.set()

    def welcome(self, seat: Seat) -> None:
        """A member has joined: what others have learned of it holds here too."""
        found = self._beliefs.entry(seat.member.id)
        if found is not None:
            at, known = found
            self._believe(seat, known, at)

    # The carrier's side.

    @property
    def pending(self) -> bool:
        """Whether there is something to take."""
        told = self._told
        return bool(told.bookings or told.homes or told.lengths or told.members or told.answers)

    def everything(self) -> None:
        """All that is known has to be told: nobody may have it."""
        told = self._told
        told.homes.update(dict.fromkeys(key for key, _, _ in self._homes.items()))
        told.lengths.update(dict.fromkeys(key for key, _, _ in self._lengths.known.items()))
        told.members.update(dict.fromkeys(seat.member.id for seat in self._registry if seat.member.role))
        self.stirred.set()

    def take(self, most: int) -> Changes:
        """Changes, at most so many of each kind."""
        told, now = self._told, self._clock()
        facts: list[Fact] = []
        records: list[tuple[Record, float]] = []
        for number in [told.bookings.pop() for _ in range(min(most, len(told.bookings)))]:
            facts.append(self._booking(number) or FreedFact(number))
        for model, session in _first(told.homes, most):
            found = self._homes.entry((model, session))
            if found is not None:
                at, home = found
                fact = HomeFact(model, session, home.prefill, home.decode)
                facts.append(fact)
                records.append((fact, at))
        for member in _first(told.members, most):
            seat = self._registry.get(member)
            if seat is not None:
                belief = self._belief(seat, now)
                facts.append(belief)
                records.append((belief, now))
        while told.answers and len(facts) < 4 * most:
            facts.append(told.answers.popleft())
        for names in _first(told.lengths, most):
            learned = self._lengths.known.entry(names)
            if learned is not None:
                records.append((LengthsFact(names, learned[1].parts()), learned[0]))
        if not self.pending:
            self.stirred.clear()
        return Changes(facts, records)

    def restore(self, changes: Changes) -> None:
        """What was taken may not have been told: it is to be told again, but for answers, which would count twice."""
        told = self._told
        for fact in changes.facts:
            if self._booked and isinstance(fact, BookingFact | FreedFact):
                told.bookings.add(fact.number)
        for record, _ in changes.records:
            match record:
                case HomeFact():
                    told.homes[record.model, record.session] = None
                case BeliefFact():
                    told.members[record.member] = None
                case LengthsFact():
                    told.lengths[record.names] = None
        self.stirred.set()

    def unbooked(self) -> None:
        """Nobody is known to have the bookings: changes are not noted until all of them are taken."""
        self._booked = False
        self._told.bookings.clear()

    def bookings(self) -> list[BookingFact]:
        """All live plans; from now on their changes are noted."""
        self._booked = True
        self._told.bookings.clear()
        return [booking for number in self._ledger.numbers() if (booking := self._booking(number))]

    def hear(self, owner: str, facts: Iterable[Fact]) -> None:
        """What another router tells."""
        for fact in facts:
            match fact:
                case BookingFact():
                    self._changed(self.others.put(owner, fact.number, self._as_booking(fact)))
                case FreedFact():
                    self._changed(self.others.drop(owner, fact.number))
                case AnswerFact():
                    names = fact.model, fact.tenant, fact.session
                    self._lengths.learn(names, fact.tokens, self._clock(), ended=fact.ended)
                case HomeFact() | BeliefFact():
                    self.load(fact, self._clock())

    def forget(self, owner: str) -> None:
        """All bookings of a router are over: it has lost its lease, or its bookings are told anew."""
        self._changed(self.others.forget(owner))

    def drop(self, plan: str) -> None:
        """A plan that was another router's, `OWNER/NUMBER`, is charged here now."""
        owner, _, number = plan.rpartition("/")
        if number.isdecimal():
            self._changed(self.others.drop(owner, int(number)))

    def load(self, record: Record, at: float) -> None:
        """What somebody knew at that time, by the planner's clock; what is known since then stays."""
        match record:
            case HomeFact():
                home = SessionHome(record.prefill, record.decode)
                self._homes.merge((record.model, record.session), home, at)
            case LengthsFact():
                self._lengths.load(record.names, record.ranges, at)
            case BeliefFact():
                self._beliefs.merge(record.member, record, at)
                seat = self._registry.get(record.member)
                if seat is not None:
                    self._believe(seat, record, at)

    def _booking(self, number: int) -> BookingFact | None:
        charge = self._ledger.live(number)
        if charge is None:
            return None
        age = max(0.0, self._clock() - charge.made_at)
        tokens, context = charge.prefill_tokens, max(0, charge.context_tokens - charge.shared_tokens)
        return BookingFact(number, charge.prefill, charge.decode, tokens, context, age)

    def _as_booking(self, fact: BookingFact) -> Booking:
        return Booking(
            prefill=fact.prefill,
            decode=fact.decode,
            prefill_tokens=fact.prefill_tokens,
            context_tokens=fact.context_tokens,
            made_at=self._clock() - fact.age_s,
        )

    def _belief(self, seat: Seat, now: float) -> BeliefFact:
        suspect = min(60.0, max(0.0, seat.suspect_until - now))
        return BeliefFact(seat.member.id, seat.prompts.believed(now), seat.answers.believed(now), suspect)

    def _believe(self, seat: Seat, known: BeliefFact, at: float) -> None:
        """As it was at that time, unless something newer is known."""
        for bias, value in ((seat.prompts, known.prompts), (seat.answers, known.answers)):
            if bias.changed_at < at:
                bias.value, bias.changed_at = value, at
        seat.suspect_until = max(seat.suspect_until, at + known.suspect_s)
        self._registry.changed.add(seat.member.id)

    def _changed(self, members: Iterable[str]) -> None:
        self._registry.changed.update(members)


def _note(names: OrderedDict[Name, None], name: Name) -> None:
    names[name] = None
    if len(names) > _MOST_NAMES:
        names.popitem(last=False)


def _first(names: OrderedDict[Name, None], most: int) -> list[Name]:
    """Takes the oldest so many out."""
    return [names.popitem(last=False)[0] for _ in range(min(most, len(names)))]
