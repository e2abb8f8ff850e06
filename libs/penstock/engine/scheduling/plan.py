"""The policy: which tokens go through the model next.

`plan` reads the lines and the number of free pages and decides, without changing anything; `Scheduler` carries it out.

Decode rows come first, then drafts, then chunks of prompts already begun, then new sequences in order of their places,
all within `max_batch_tokens` and what prompts may have of the step (`PromptRoom`). When pages run out, sequences that
do not run yet give up their loaded pages; then the youngest running sequence goes back to the line and keeps its
output. That does not free pages that a sink still holds; a sequence for which no page can be freed skips steps until
the sink lets go.

No block is computed twice: a sequence whose next block is computed in this step, by another before it, skips the step
and has that block's page at the next one. It keeps its place, and none behind it in the line begins before it. Who
computes is chosen anew for each step, so one that ends or has to wait holds nobody up.

The leading tokens of its next block that a sequence can copy from another's page are not computed, and nobody waits for
them: whoever begins while another computes them computes them too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of the size of a step, and the number of tokens in a page."""

    max_batch_tokens: int
    max_running: int
    block_size: int

    def pages_for(self, tokens: int) -> int:
        """Number of pages that `tokens` tokens need."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRoom:
    """How many tokens of prompts a step may compute."""

    beside: int | None = None
    """Most of them in a step with decode rows; None: as many as fit."""
    alone: int | None = None
    """Most of them in a step without; None: as many as fit."""
    whole: int = 0
    """A step with decode rows and no other prompt computes all of one that begins, if that is no more than this."""
    enough: int | None = None
    """Where a prompt ends in a step that has at least so many of them, no other follows; None: the step is filled."""


ANY_ROOM = PromptRoom()
"""As many as fit."""


class Schedulable(Protocol):
    """The part of a sequence that the policy reads."""

    @property
    def ticket(self) -> int:
        """Names it."""
        ...

    @property
    def place(self) -> int:
        """In line: lower is earlier."""
        ...

    @property
    def length(self) -> int:
        """All known tokens."""
        ...

    @property
    def remaining(self) -> int:
        """Known tokens whose KV is still to be computed; 1 is a decode step."""
        ...

    @property
    def pages(self) -> Sequence[int]:
        """Held by the sequence."""
        ...

    @property
    def next_key(self) -> bytes | None:
        """Names the block that its next token belongs to; None when that is its own, whatever others compute."""
        ...


@dataclass(slots=True)
class Portion:
    """One sequence's share of a step: consecutive tokens, and drafts behind them."""

    ticket: int
    known: int
    """Known tokens to compute, starting at the first one without KV that is not copied."""
    new_pages: int
    drafts: int = 0
    copied: int = 0
    """Known tokens before them that can be copied."""


@dataclass(slots=True)
class StepPlan:
    """The changes to make for the next step, in the order of the fields. Tickets name the sequences."""

    preempt: list[int] = field(default_factory=list)
    """Running sequences that lose their pages and go back to the line."""
    strip: list[int] = field(default_factory=list)
    """Waiting or loading sequences that lose their loaded pages and keep their place."""
    admit: list[int] = field(default_factory=list)
    """The head of the line that starts running."""
    portions: list[Portion] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a plan depends on. The lines are in order of their places."""

    limits: StepLimits
    free: int
    """Free pages."""
    running: Sequence[Schedulable]
    """Each holds pages for all its known tokens but possibly the last."""
    waiting: Sequence[Schedulable]
    """Some hold pages that a source has filled."""
    loading: Sequence[Schedulable] = ()
    """Not in line yet; a source is filling their pages."""
    drafts: Mapping[int, int] = field(default_factory=dict)
    """Proposed tokens at hand, by ticket."""
    copyable: Callable[[Any], int] = lambda _live: 0
    """How many tokens a sequence of the lines can copy instead of computing them: the leading ones of its next block,
    never its last token."""
    holds: Callable[[int], int] = lambda _page: 1
    """How many hold a page: sequences, sinks and copies. It comes free when all have given it back."""
    stalled: bool = False
    """No sequence could run for a while, so the plan may take even pages that are being filled."""
    room: PromptRoom = ANY_ROOM


class _Planner:
    """The working state of one call of `plan`: the tokens and pages that are left."""

    def __init__(self, situation: Situation) -> None:
        self.limits = situation.limits
        self.free = situation.free
        self.copyable = situation.copyable
        self.holds = situation.holds
        self.given: Counter[int] = Counter()
        """Holds that sequences give back in this plan, by page."""
        self.budget = situation.limits.max_batch_tokens
        self.room = situation.room
        self.whole = 0
        """Most tokens of a prompt that goes into the step whole; 0 once there is one in it."""
        self.prompt_tokens = 0
        """Of all prompts in the step."""
        self.running = list(situation.running)
        self.waiting = situation.waiting
        self.loading = situation.loading
        self.plan = StepPlan()
        self.computed: set[bytes] = set()
        """The next blocks of all sequences that compute one in this step."""

    def missing(self, live: Schedulable, tokens: int) -> int:
        held = 0 if live.ticket in self.plan.strip else len(live.pages)
        return max(0, self.limits.pages_for(tokens) - held)

    def waits(self, live: Schedulable) -> bool:
        """Whether another sequence computes its next block in this step. One that needs only some of the block's tokens
        does not wait: it has to compute its last token itself."""
        done = live.length - live.remaining
        whole = done // self.limits.block_size < (live.length - 1) // self.limits.block_size
        return whole and live.ticket not in self.plan.strip and live.next_key in self.computed

    def strip(self, line: Sequence[Schedulable], also: Sequence[Schedulable] = (), after: int = -1) -> bool:
        """Takes the pages of the youngest in `line` that is after place `after` and whose pages help; those that it
        shares do when the others are in `line` or `also`, and can be taken too."""
        live = self.helpful(line, self.strippable(*line, *also), after)
        if live is None:
            return False
        self.plan.strip.append(live.ticket)
        self.give_back(live)
        return True

    def preempt(self, after: int) -> bool:
        """Sends the youngest running sequence back that is after place `after` and whose pages help."""
        younger = [live for live in self.running if live.place > after]
        live = self.helpful(younger, [*younger, *self.strippable(*self.waiting, *self.loading)], after)
        if live is None:
            return False
        self.running.remove(live)
        self.plan.preempt.append(live.ticket)
        self.give_back(live)
        return True

    def strippable(self, *line: Schedulable) -> list[Schedulable]:
        """Those that can still give up their pages."""
        return [live for live in line if live.ticket not in self.plan.strip and live.ticket not in self.plan.admit]

    def helpful(self, line: Sequence[Schedulable], able: Sequence[Schedulable], after: int) -> Schedulable | None:
        """The youngest in `line` that is after place `after`, is `able` to give up its pages, and holds one that
        comes free when all who are able to give it back do."""
        able = [live for live in able if live.place > after]
        theirs = Counter(page for live in able for page in live.pages)
        for live in reversed(line):
            if live in able and any(self.holds(page) - self.given[page] == theirs[page] for page in live.pages):
                return live
        return None

    def give_back(self, live: Schedulable) -> None:
        self.given.update(live.pages)
        self.free += sum(self.given[page] == self.holds(page) for page in live.pages)

    def decode(self, live: Schedulable) -> Portion | None:
        """The portion of a running sequence with one token to go; None when it has to skip this step."""
        need = self.missing(live, live.length)
        while self.free < need:
            if not self.make_room(live):
                return None
        self.free -= need
        self.budget -= 1
        return Portion(live.ticket, 1, need)

    def make_room(self, live: Schedulable) -> bool:
        """Takes the pages of one sequence for a running one; False when that helps no more."""
        line, loading = self.waiting, self.loading
        return self.strip(line, loading) or self.strip(loading, line) or self.preempt(live.place)

    def draft(self, live: Schedulable, portion: Portion, wanted: int) -> None:
        """Adds as many drafts as budget and free pages allow; it takes no page from another sequence."""
        room = (len(live.pages) + portion.new_pages + self.free) * self.limits.block_size - live.length
        portion.drafts = max(0, min(wanted, self.budget, room))
        extra = self.missing(live, live.length + portion.drafts) - portion.new_pages
        portion.new_pages += extra
        self.free -= extra
        self.budget -= portion.drafts

    def bound_prompts(self, beside_streams: bool) -> None:
        """Leaves of the budget what prompts may have of it, now that decode rows and drafts have theirs."""
        most = self.room.beside if beside_streams else self.room.alone
        self.whole = min(self.room.whole, self.budget) if beside_streams else 0
        if most is not None:
            self.budget = min(self.budget, most)

    def left(self, live: Schedulable) -> tuple[int, int]:
        """(Known tokens that it has still to compute, those before them that it can copy)."""
        if live.ticket in self.plan.strip:
            return live.length, 0
        copied = self.copyable(live)
        return live.remaining - copied, copied

    def prefill(self, live: Schedulable, new_pages: int, left: int, copied: int) -> None:
        if live.next_key is not None and live.ticket not in self.plan.strip:
            self.computed.add(live.next_key)
        count = min(left, self.budget)
        self.budget -= count
        self.free -= new_pages
        self.plan.portions.append(Portion(live.ticket, count, new_pages, copied=copied))
        self.whole = 0
        self.prompt_tokens += count
        if count == left and self.room.enough is not None and self.prompt_tokens >= self.room.enough:
            self.budget = 0

    def admit(self, stalled: bool) -> None:
        """New sequences in order, each with pages for all it knows, so that a prefill never starves half-way."""
        for live in self.waiting:
            if len(self.running) >= self.limits.max_running or self.budget < 1 or self.waits(live):
                return
            need = self.missing(live, live.length)
            while not self.running and self.free < need:
                loading = self.loading if stalled else ()
                if not (self.strip(self.waiting, loading, live.place) or self.strip(loading)):
                    break
            if self.free - need < len(self.running):
                return
            left, copied = self.left(live)
            if self.budget < left <= self.whole:
                self.budget = left
            self.running.append(live)
            self.plan.admit.append(live.ticket)
            self.prefill(live, need, left, copied)


def plan(situation: Situation) -> StepPlan:
    """The next step.

    The portions hold at most `max_batch_tokens` tokens and ask for no page that is not free once `preempt`
    and `strip` are carried out.
    """
    work = _Planner(situation)
    decoding: list[tuple[Schedulable, Portion]] = []
    for live in situation.running:
        if live.remaining == 1 and live.ticket not in work.plan.preempt and work.budget > 0:
            portion = work.decode(live)
            if portion is not None:
                decoding.append((live, portion))
    for live, portion in decoding:
        work.draft(live, portion, situation.drafts.get(live.ticket, 0))
        work.plan.portions.append(portion)
    work.bound_prompts(bool(decoding))
    for live in list(work.running):
        if live.remaining > 1 and work.budget > 0 and not work.waits(live):
            work.prefill(live, 0, *work.left(live))
    if not work.plan.preempt:
        work.admit(situation.stalled)
    return work.plan
