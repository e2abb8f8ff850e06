"""Which tokens go through the model next.

`plan` is the policy: it reads the two lines and the number of free pages and says what to do, touching nothing.
`Scheduler` owns the lines and the page pool and carries plans out. Neither knows of tensors, clocks or awaits.

Decode rows come first, then drafts, then chunks of prompts already begun, then new sequences in order of arrival,
all within `max_batch_tokens`. When pages run out, sequences that wait with loaded pages give theirs up, then the
youngest running sequence goes back to the line with its output kept.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.engine.sequence import Sequence as Live
from penstock.kv.pages import PagePool


@dataclass(frozen=True, slots=True)
class Limits:
    max_batch_tokens: int
    max_running: int
    block_size: int

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


class Candidate(Protocol):
    """What the policy sees of a sequence."""

    @property
    def ticket(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def remaining(self) -> int: ...

    @property
    def pages(self) -> Sequence[int]: ...


@dataclass(slots=True)
class Row:
    """A run of consecutive tokens of one sequence, and drafts behind it."""

    ticket: int
    count: int
    """Known tokens to compute, starting at the first one without KV."""
    new_pages: int
    drafts: int = 0


@dataclass(slots=True)
class Plan:
    """To be carried out in the order of the fields."""

    preempt: list[int] = field(default_factory=list)
    """Running sequences that lose their pages and go back to the line."""
    strip: list[int] = field(default_factory=list)
    """Waiting sequences that lose their loaded pages and keep their place."""
    admit: list[int] = field(default_factory=list)
    """The head of the line that starts running."""
    rows: list[Row] = field(default_factory=list)


class _Planner:
    """The working state of one call of `plan`: what is left to give."""

    def __init__(self, limits: Limits, free: int, running: Sequence[Candidate], waiting: Sequence[Candidate]) -> None:
        self.limits = limits
        self.free = free
        self.budget = limits.max_batch_tokens
        self.running = list(running)
        self.waiting = waiting
        self.holders = [one for one in waiting if one.pages]
        self.plan = Plan()

    def missing(self, one: Candidate, tokens: int) -> int:
        held = 0 if one.ticket in self.plan.strip else len(one.pages)
        return max(0, self.limits.pages_for(tokens) - held)

    def strip_youngest(self, older_than: int = -1) -> bool:
        """Takes the pages of the youngest waiting holder that came after ticket `older_than`."""
        if not self.holders or self.holders[-1].ticket <= older_than:
            return False
        victim = self.holders.pop()
        self.plan.strip.append(victim.ticket)
        self.free += len(victim.pages)
        return True

    def preempt_youngest(self) -> Candidate:
        victim = self.running.pop()
        self.plan.preempt.append(victim.ticket)
        self.free += len(victim.pages)
        return victim

    def decode(self, one: Candidate) -> Row | None:
        """The row of a running sequence with one token to go; None when it had to give way itself."""
        need = self.missing(one, one.length)
        while self.free < need:
            if not self.strip_youngest() and self.preempt_youngest() is one:
                return None
        self.free -= need
        self.budget -= 1
        return Row(one.ticket, 1, need)

    def draft(self, one: Candidate, row: Row, wanted: int) -> None:
        """As many drafts as budget and free pages allow; nobody loses a page for a guess."""
        room = (len(one.pages) + row.new_pages + self.free) * self.limits.block_size - one.length
        row.drafts = max(0, min(wanted, self.budget, room))
        extra = self.missing(one, one.length + row.drafts) - row.new_pages
        row.new_pages += extra
        self.free -= extra
        self.budget -= row.drafts

    def prefill(self, one: Candidate, new_pages: int) -> None:
        remaining = one.length if one.ticket in self.plan.strip else one.remaining
        count = min(remaining, self.budget)
        self.budget -= count
        self.free -= new_pages
        self.plan.rows.append(Row(one.ticket, count, new_pages))

    def admit(self) -> None:
        """New sequences in order, each with pages for all it knows, so that a prefill never starves half-way."""
        for one in self.waiting:
            if len(self.running) >= self.limits.max_running or self.budget < 1:
                return
            need = self.missing(one, one.length)
            while not self.running and self.free < need and self.strip_youngest(one.ticket):
                pass
            if self.free - need < len(self.running):
                return
            self.holders = [other for other in self.holders if other is not one]
            self.running.append(one)
            self.plan.admit.append(one.ticket)
            self.prefill(one, need)


def plan(
    limits: Limits,
    free: int,
    running: Sequence[Candidate],
    waiting: Sequence[Candidate],
    drafts: Mapping[int, int],
) -> Plan:
    """The next step.

    `running` and `waiting` are in order of arrival, `free` counts free pages, `drafts` says by ticket how many
    proposed tokens are at hand. Every running sequence holds pages for all its known tokens but possibly the
    last. The rows of the plan hold at most `max_batch_tokens` tokens and ask for no page that is not free once
    `preempt` and `strip` are carried out.
    """
    work = _Planner(limits, free, running, waiting)
    decoding: list[tuple[Candidate, Row]] = []
    for one in running:
        if one.remaining == 1 and one.ticket not in work.plan.preempt and work.budget > 0:
            row = work.decode(one)
            if row is not None:
                decoding.append((one, row))
    for one, row in decoding:
        work.draft(one, row, drafts.get(one.ticket, 0))
        work.plan.rows.append(row)
    for one in list(work.running):
        if one.remaining > 1 and work.budget > 0:
            work.prefill(one, 0)
    if not work.plan.preempt:
        work.admit()
    return work.plan


def _by_ticket(one: Live) -> int:
    return one.ticket


class Scheduler:
    """Owner of the lines and of every sequence's pages."""

    def __init__(self, limits: Limits, pool: PagePool) -> None:
        self.limits = limits
        self.pool = pool
        self.running: list[Live] = []
        self.waiting: list[Live] = []
        self.preemptions = 0

    def add(self, one: Live) -> None:
        """Puts a sequence (whose loaded pages come with it) in the line, at its place by arrival."""
        insort(self.waiting, one, key=_by_ticket)

    def decoding(self) -> list[Live]:
        """Running sequences whose next step can take drafts."""
        return [one for one in self.running if one.remaining == 1]

    def next_step(self, drafts: Mapping[int, int]) -> list[tuple[Live, Row]]:
        """Plans a step, carries the plan out and marks its sequences busy until `settle`."""
        made = plan(self.limits, self.pool.free, self.running, self.waiting, drafts)
        live = {one.ticket: one for line in (self.running, self.waiting) for one in line}
        for ticket in made.preempt:
            self._preempt(live[ticket])
        for ticket in made.strip:
            self._take_pages(live[ticket])
            live[ticket].forget_loaded()
        for ticket in made.admit:
            self.waiting.remove(live[ticket])
            insort(self.running, live[ticket], key=_by_ticket)
        step = [(live[row.ticket], row) for row in made.rows]
        for one, row in step:
            assert not one.busy, f"{one.owner} is in two steps"
            one.busy = True
            if row.new_pages:
                self.grow(one, row.new_pages)
        return step

    def grow(self, one: Live, pages: int) -> None:
        one.pages.extend(self.pool.allocate(one.owner, pages))
        one.version += 1

    def _preempt(self, one: Live) -> None:
        self.running.remove(one)
        self._take_pages(one)
        one.preemptions += 1
        self.preemptions += 1
        self.add(one)

    def _take_pages(self, one: Live) -> None:
        self.pool.release(one.owner, one.pages)
        one.pages.clear()
        one.version += 1
        one.computed = 0

    def drop(self, one: Live) -> None:
        """Takes a sequence out for good. Its pages go at once, or in `settle` when a step is using them."""
        one.gone = True
        for line in (self.running, self.waiting):
            if one in line:
                line.remove(one)
        if not one.busy:
            self._take_pages(one)

    def settle(self, one: Live) -> None:
        """The step that used the sequence is over."""
        one.busy = False
        if one.gone:
            self._take_pages(one)
