"""Which tokens go through the model next.

`plan` is the policy: it reads the two lines and the number of free pages and says what to do, touching nothing.
`Scheduler` owns the lines and the page pool and carries plans out. Neither knows of tensors, clocks or awaits.

Decode rows come first, then drafts, then chunks of prompts already begun, then new sequences in order of arrival,
all within `max_batch_tokens`; beside decode rows, prompts get `chunk` tokens at most. When pages run out, sequences
with loaded pages that do not run yet give theirs up, then the youngest running sequence goes back to the line with its
output kept. Pages that a sink still holds do not come free by that; a sequence that cannot be helped otherwise sits
steps out until they do.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
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
    """Waiting or loading sequences that lose their loaded pages and keep their place."""
    admit: list[int] = field(default_factory=list)
    """The head of the line that starts running."""
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a plan depends on. The lines are in order of arrival."""

    limits: Limits
    free: int
    """Free pages."""
    running: Sequence[Candidate]
    """Each holds pages for all its known tokens but possibly the last."""
    waiting: Sequence[Candidate]
    """Some hold pages that a source has filled."""
    loading: Sequence[Candidate] = ()
    """Not in line yet; a source is filling their pages."""
    drafts: Mapping[int, int] = field(default_factory=dict)
    """Proposed tokens at hand, by ticket."""
    freeable: Callable[[Sequence[int]], int] = len
    """How many of a sequence's pages come free when it gives them back: not those that a sink or a copy holds."""
    stalled: bool = False
    """Nothing has moved for a while, so even pages that are being filled may be taken."""
    chunk: int | None = None
    """Most tokens of prompts in a step with decode rows; None: as many as there is room for. At least 1."""


class _Planner:
    """The working state of one call of `plan`: what is left to give."""

    def __init__(self, situation: Situation) -> None:
        self.limits = situation.limits
        self.free = situation.free
        self.freeable = situation.freeable
        self.budget = situation.limits.max_batch_tokens
        self.running = list(situation.running)
        self.waiting = situation.waiting
        self.loading = situation.loading
        self.plan = Plan()

    def missing(self, one: Candidate, tokens: int) -> int:
        held = 0 if one.ticket in self.plan.strip else len(one.pages)
        return max(0, self.limits.pages_for(tokens) - held)

    def strip(self, line: Sequence[Candidate], after: int = -1) -> bool:
        """Takes the pages of the youngest in `line` that came after ticket `after` and whose pages help."""
        for one in reversed(line):
            taken = one.ticket in self.plan.strip or one.ticket in self.plan.admit
            if one.ticket > after and not taken and (gain := self.freeable(one.pages)):
                self.plan.strip.append(one.ticket)
                self.free += gain
                return True
        return False

    def preempt(self, after: int) -> bool:
        """Sends the youngest running sequence back that came after ticket `after` and whose pages help."""
        for one in reversed(self.running):
            if one.ticket > after and (gain := self.freeable(one.pages)):
                self.running.remove(one)
                self.plan.preempt.append(one.ticket)
                self.free += gain
                return True
        return False

    def decode(self, one: Candidate) -> Row | None:
        """The row of a running sequence with one token to go; None when it has to sit this step out."""
        need = self.missing(one, one.length)
        while self.free < need:
            if not (self.strip(self.waiting) or self.strip(self.loading) or self.preempt(one.ticket)):
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

    def admit(self, stalled: bool) -> None:
        """New sequences in order, each with pages for all it knows, so that a prefill never starves half-way."""
        for one in self.waiting:
            if len(self.running) >= self.limits.max_running or self.budget < 1:
                return
            need = self.missing(one, one.length)
            while not self.running and self.free < need:
                if not (self.strip(self.waiting, one.ticket) or (stalled and self.strip(self.loading))):
                    break
            if self.free - need < len(self.running):
                return
            self.running.append(one)
            self.plan.admit.append(one.ticket)
            self.prefill(one, need)


def plan(situation: Situation) -> Plan:
    """The next step.

    The rows of the plan hold at most `max_batch_tokens` tokens and ask for no page that is not free once `preempt`
    and `strip` are carried out.
    """
    work = _Planner(situation)
    decoding: list[tuple[Candidate, Row]] = []
    for one in situation.running:
        if one.remaining == 1 and one.ticket not in work.plan.preempt and work.budget > 0:
            row = work.decode(one)
            if row is not None:
                decoding.append((one, row))
    for one, row in decoding:
        work.draft(one, row, situation.drafts.get(one.ticket, 0))
        work.plan.rows.append(row)
    if decoding and situation.chunk is not None:
        work.budget = min(work.budget, situation.chunk)
    for one in list(work.running):
        if one.remaining > 1 and work.budget > 0:
            work.prefill(one, 0)
    if not work.plan.preempt:
        work.admit(situation.stalled)
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
        self.loading: list[Live] = []
        self.preemptions = 0
        self._decoding: list[tuple[Live, Row]] | None = None
        """The last step, when it was nothing but a token for each that runs, and nobody has come or gone since."""

    def load(self, one: Live) -> None:
        """A source begins to fill the sequence's pages; ends with `add` or `drop`."""
        self._decoding = None
        insort(self.loading, one, key=_by_ticket)

    def add(self, one: Live) -> None:
        """Puts a sequence (whose loaded pages come with it) in the line, at its place by arrival."""
        self._decoding = None
        if one in self.loading:
            self.loading.remove(one)
        insort(self.waiting, one, key=_by_ticket)

    def decoding(self) -> list[Live]:
        """Running sequences whose next step can take drafts."""
        return [one for one in self.running if one.remaining == 1]

    def next_step(
        self, drafts: Mapping[int, int], stalled: bool = False, chunk: int | None = None
    ) -> list[tuple[Live, Row]]:
        """Plans a step, carries the plan out and marks its sequences busy until `settle`."""
        step = self._once_more() if not drafts else None
        if step is None:
            step = self._planned(drafts, stalled, chunk)
        for one, _ in step:
            assert not one.busy, f"{one.owner} is in two steps"
            one.busy = True
        return step

    def _once_more(self) -> list[tuple[Live, Row]] | None:
        """The last step again, one token later: what `plan` would say, in a fraction of its time. None where it
        would say something else."""
        step, size = self._decoding, self.limits.block_size
        if step is None:
            return None
        full = []
        for one, _ in step:
            length = len(one.tokens)
            if length - one.computed != 1:
                return None
            if length > len(one.pages) * size:
                full.append(one)
        if len(full) > self.pool.free:
            return None
        for one in full:
            self.grow(one, 1)
        return step

    def _planned(self, drafts: Mapping[int, int], stalled: bool, chunk: int | None) -> list[tuple[Live, Row]]:
        lines = (self.running, self.waiting, self.loading)
        situation = Situation(self.limits, self.pool.free, *lines, drafts, self.pool.sole, stalled, chunk)
        made = plan(situation)
        live = {one.ticket: one for line in lines for one in line}
        for ticket in made.preempt:
            self._preempt(live[ticket])
        for ticket in made.strip:
            self._strip(live[ticket])
        for ticket in made.admit:
            self.waiting.remove(live[ticket])
            insort(self.running, live[ticket], key=_by_ticket)
        step = [(live[row.ticket], row) for row in made.rows]
        for one, row in step:
            if row.new_pages:
                self.grow(one, row.new_pages)
        alike = len(step) == len(self.running) and all(row.count == 1 and not row.drafts for row in made.rows)
        self._decoding = step if alike and not self.waiting else None
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

    def _strip(self, one: Live) -> None:
        self._take_pages(one)
        one.forget_loaded()

    def _take_pages(self, one: Live) -> None:
        self.pool.release(one.owner, one.pages)
        one.pages.clear()
        one.version += 1
        one.computed = 0

    def drop(self, one: Live) -> None:
        """Takes a sequence out for good. Its pages go at once, or in `settle` when a step is using them."""
        self._decoding = None
        one.gone = True
        for line in (self.running, self.waiting, self.loading):
            if one in line:
                line.remove(one)
        if not one.busy:
            self._take_pages(one)

    def settle(self, one: Live) -> None:
        """The step that used the sequence is over."""
        one.busy = False
        if one.gone:
            self._take_pages(one)
