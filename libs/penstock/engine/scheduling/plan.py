"""The policy: which tokens go through the model next.

`plan` reads the lines and the number of free pages and decides, without changing anything; `Scheduler` carries it out.

Decode rows come first, then drafts, then sequences that are resumed, then chunks of prompts already begun, then new
sequences in order of their places, all within `max_batch_tokens` and what prompts may have of the step (`PromptRoom`).
When pages run out, sequences that do not run yet give up their loaded pages; then the youngest running sequence goes
back to the line and keeps its output. That does not free pages that a sink still holds; a sequence for which no page
can be freed skips steps until the sink lets go.

No block is computed twice: a sequence whose next block is computed in this step, by another before it, skips the step
and has that block's page at the next one. It keeps its place, and none behind it in the line begins before it. Who
computes is chosen anew for each step, so one that ends or has to wait holds nobody up.

The leading tokens of its next block that a sequence can copy from another's page are not computed, and nobody waits for
them: whoever begins while another computes them computes them too.

A prompt is computed up to the first picture whose embeddings are not there yet. One that can't go on for that keeps its
pages, and so only one begins that will have to wait for some; those behind it in the line pass it.

Where several steps are computed at a time, sequences that are in one stay as they are until it is over, and each step
takes its share of the streams.

Sequences that yield get what the others have left of a step (`Leftover`): they stand behind all of them, take no page
that these could need soon, and lose their pages and their places to any that wants them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.engine.scheduling.chunking import LEAST_TOKENS
from penstock.engine.scheduling.leftover import BEFORE_ALL, YIELDS_FROM
from penstock.engine.scheduling.situation import ANY_ROOM, Portion, Schedulable, Situation, StepPlan


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
        self.leftover = situation.leftover
        self.reserve = situation.reserve
        self.crowded = False
        """A sequence that does not yield was sent back: there is no room for others."""
        self.whole = 0
        """Most tokens of a prompt that goes into the step whole; 0 once there is one in it."""
        self.prompt_tokens = 0
        """Of all prompts in the step."""
        self.running = list(situation.running)
        self.flying = any(live.busy and live.remaining == 1 and not yields(live) for live in situation.running)
        """A step that is being computed has streams, whose next step waits for this one."""
        self.waiting = situation.waiting
        self.loading = situation.loading
        self.plan = StepPlan()
        self.computed = {live.next_key for live in situation.running if live.busy and live.next_key is not None}
        """The next blocks of all sequences that compute one in this step, or in one that is being computed."""

    def missing(self, live: Schedulable, tokens: int) -> int:
        held = 0 if live.ticket in self.plan.strip else len(live.pages)
        return max(0, self.limits.pages_for(tokens) - held)

    def waits(self, live: Schedulable) -> bool:
        """Whether another sequence computes its next block in this step. One that needs only some of the block's tokens
        does not wait: it has to compute its last token itself."""
        done = live.length - live.remaining
        whole = done // self.limits.block_size < (live.length - 1) // self.limits.block_size
        return whole and live.ticket not in self.plan.strip and live.next_key in self.computed

    def strip(self, line: Sequence[Schedulable], also: Sequence[Schedulable] = (), after: int = BEFORE_ALL) -> bool:
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
        if live is None or live.busy:  # none goes in place of one that is younger
            return False
        self.send_back(live)
        return True

    def send_back(self, live: Schedulable) -> None:
        """A running sequence goes back to the line."""
        self.running.remove(live)
        self.plan.preempt.append(live.ticket)
        self.give_back(live)
        self.crowded = self.crowded or not yields(live)

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
        line, loading, after = self.waiting, self.loading, live.place if yields(live) else BEFORE_ALL
        return self.strip(line, loading, after) or self.strip(loading, line, after) or self.preempt(live.place)

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

    def visible(self, live: Schedulable, left: int) -> int:
        """How many of the tokens that it has left to compute lie before a picture whose embeddings are not there."""
        first = live.length - left
        return min(left, live.visible(first) - first)

    def looks(self) -> bool:
        """Whether a running prompt waits, or will have to, for embeddings."""
        return any(live.visible(live.length - live.remaining) < live.length for live in self.running)

    def prefill(self, live: Schedulable, new_pages: int, left: int, copied: int) -> None:
        if live.next_key is not None and live.ticket not in self.plan.strip:
            self.computed.add(live.next_key)
        count = min(self.visible(live, left), self.budget)
        self.budget -= count
        self.free -= new_pages
        self.plan.portions.append(Portion(live.ticket, count, new_pages, copied=copied))
        self.whole = 0
        self.prompt_tokens += count
        if count == left and self.room.enough is not None and self.prompt_tokens >= self.room.enough:
            self.budget = 0

    def proceed(self, line: Sequence[Schedulable]) -> None:
        """Chunks of prompts already begun, in order."""
        for live in line:
            if live in self.running and self.budget > 0 and not self.waits(live):
                left, copied = self.left(live)
                if self.visible(live, left):
                    self.prefill(live, 0, left, copied)

    def admit(self, line: Sequence[Schedulable], stalled: bool) -> bool:
        """New sequences in order, each with pages for all it knows, so that a prefill never starves half-way. Whether
        none was held up by the others."""
        for live in line:
            if self.budget < 1 or self.waits(live):
                return False
            left, copied = self.left(live)
            seen = self.visible(live, left)
            if seen < left and (not seen or self.looks()):
                continue  # a picture takes long: one prompt holds pages meanwhile, and others need not wait for it
            need = self.missing(live, live.length)
            if not yields(live):
                self.clear(live, need)
            if len(self.running) >= self.limits.max_running:
                return False
            while not self.running and self.free < need:
                loading, after = self.loading if stalled else (), live.place if yields(live) else BEFORE_ALL
                if not (self.strip(self.waiting, loading, live.place) or self.strip(loading, after=after)):
                    break
            if self.free - need < self.kept_free(live):
                return False
            if self.budget < seen <= self.whole:
                self.budget = seen
            self.running.append(live)
            self.plan.admit.append(live.ticket)
            self.prefill(live, need, left, copied)
        return True

    def kept_free(self, live: Schedulable) -> int:
        """Pages that have to be left when a sequence begins: one for each that runs; it does not count those that would
        give way to it."""
        if yields(live):
            return len(self.running) + (self.reserve if self.running else 0)
        return sum(not yields(one) for one in self.running)

    def clear(self, live: Schedulable, need: int) -> None:
        """Sequences that yield make room for one that does not, and that needs so many pages."""
        behind = YIELDS_FROM - 1
        while self.free - need < self.kept_free(live) and (
            self.strip(self.waiting, self.loading, behind) or self.preempt(behind)
        ):
            pass
        if len(self.running) >= self.limits.max_running:
            last = max(self.running, key=lambda live: live.place)
            if yields(last) and not last.busy:
                self.send_back(last)

    def fill(self, stalled: bool) -> None:
        """What the others have left of the step goes to sequences that yield. In a step without others their decode
        rows leave half of it to their prompts, where there are any: these would not begin otherwise."""
        beside = self.flying or bool(self.plan.portions)
        seconds = self.leftover.beside_s if beside else self.leftover.alone_s
        if seconds <= 0:
            return
        self.budget = self.limits.max_batch_tokens - sum(one.known + one.drafts for one in self.plan.portions)
        self.room, self.whole = ANY_ROOM, 0
        waiting = [live for live in self.waiting if yields(live)]
        if beside:
            self.fill_prompts(seconds - self.fill_rows(seconds, least=0), waiting, stalled, least=0)
            return
        while self.free < self.reserve // 2 and len(self.running) > 1 and self.preempt(YIELDS_FROM - 1):
            pass
        may_begin = bool(waiting) and len(self.running) < self.limits.max_running
        prompts = may_begin or any(live.remaining > 1 and not live.busy for live in self.running)
        taken = self.fill_rows(seconds / 2 if prompts else seconds, least=1)
        self.fill_prompts(seconds - taken, waiting, stalled, least=LEAST_TOKENS)
        if self.plan.portions or any(live.busy for live in self.running):
            return
        while not self.plan.portions and self.strip(self.waiting, self.loading, YIELDS_FROM - 1):
            self.fill_rows(seconds, least=1)  # older ones have gone back, and found their pages

    def fill_rows(self, seconds: float, *, least: int) -> float:
        """Decode rows of sequences that yield, for as long, but at least so many; the seconds that they take."""
        taken, rows = 0.0, 0
        for live in [live for live in self.running if yields(live) and live.remaining == 1 and not live.busy]:
            cost = self.leftover.row(live.length)
            if self.budget < 1 or len(self.plan.portions) >= self.limits.max_running:
                break
            if rows >= least and taken + cost > seconds:
                break
            portion = self.decode(live) if live in self.running else None
            if portion is not None:
                self.plan.portions.append(portion)
                taken, rows = taken + cost, rows + 1
        return taken

    def fill_prompts(self, seconds: float, waiting: Sequence[Schedulable], stalled: bool, *, least: int) -> None:
        """Prompts of sequences that yield, for as long, but at least so many tokens."""
        begun = [live for live in self.running if yields(live) and live.remaining > 1 and not live.busy]
        tokens = max(least, self.leftover.tokens(seconds))
        if tokens < LEAST_TOKENS or not (begun or waiting):
            return
        self.plan.settled = False
        self.budget = min(tokens, self.budget)
        self.proceed(begun)
        self.admit([live for live in waiting if live.ticket not in self.plan.strip], stalled)


def yields(live: Schedulable) -> bool:
    """Whether the sequence gets only what others leave."""
    return live.place >= YIELDS_FROM


def resumed(live: Schedulable) -> bool:
    """Whether the sequence comes before prompts, those that are begun too."""
    return live.place < 0


def plan(situation: Situation) -> StepPlan:
    """The next step.

    The portions hold at most `max_batch_tokens` tokens and ask for no page that is not free once `preempt`
    and `strip` are carried out.
    """
    work = _Planner(situation)
    decoding: list[tuple[Schedulable, Portion]] = []
    streams = sum(live.remaining == 1 for live in situation.running if not yields(live))
    most = -(-streams // situation.limits.flights)
    others = [live for live in situation.running if not (yields(live) or live.busy)]
    for live in others:
        if len(decoding) == most:
            break
        if live.remaining == 1 and live.ticket not in work.plan.preempt and work.budget > 0:
            portion = work.decode(live)
            if portion is not None:
                decoding.append((live, portion))
    for live, portion in decoding:
        work.draft(live, portion, situation.drafts.get(live.ticket, 0))
        work.plan.portions.append(portion)
    work.bound_prompts(work.flying or bool(decoding))
    begun, line = [live for live in others if live.remaining > 1], situation.waiting
    work.proceed([live for live in begun if resumed(live)])
    may_begin = not work.crowded and work.admit([live for live in line if resumed(live)], situation.stalled)
    work.proceed([live for live in begun if not resumed(live)])
    if may_begin:
        work.admit([live for live in line if not (resumed(live) or yields(live))], situation.stalled)
    if len(others) < len(situation.running) or any(map(yields, situation.waiting)):
        work.fill(situation.stalled)
    return work.plan
