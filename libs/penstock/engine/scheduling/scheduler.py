"""The owner of every sequence's tokens and pages: carries out the policy's plans and takes in the tokens of steps."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from penstock.engine.errors import EngineError, NotFinite
from penstock.engine.hooks import LoadResult
from penstock.engine.pages import PagePool
from penstock.engine.request import FinishReason
from penstock.engine.sampling.choice import Chosen
from penstock.engine.scheduling.leftover import ANY_LEFTOVER, YIELDS_FROM, Leftover
from penstock.engine.scheduling.live import Live
from penstock.engine.scheduling.outstanding import Outstanding
from penstock.engine.scheduling.plan import plan, resumed, yields
from penstock.engine.scheduling.sharing import Sharing
from penstock.engine.scheduling.situation import ANY_ROOM, PromptRoom, Situation, StepLimits
from penstock.kv.parts import Reach


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that ended normally. It keeps its pages until it is dropped."""

    live: Live
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    running: int
    """Those that yield not included, here and in the next two."""
    waiting: int
    queued_tokens: int
    """Known tokens of waiting and running sequences whose KV steps have still to compute or to copy: those of a block
    that several wait for once, those in pages that are shared and decode rows not at all."""
    loading: int
    yielding: int
    """Sequences that yield, wherever they are."""
    free_pages: int
    roomy_pages: int
    """Those, and pages that sequences which yield would give back, about."""
    total_pages: int
    resident_pages: int
    """Pages that hold a block under its key, whether a sequence uses it or not."""
    shared_pages: int
    """Pages that more than one sequence or sink holds."""
    copied_tokens: int
    """Tokens whose KV steps have copied from a page of another sequence instead of computing it."""
    preemptions: int
    generated_tokens: int
    """Number of tokens that steps have generated."""


_RESERVED = 4
"""One of so many pages is left free by sequences that yield: KV that is fetched for a request has to go somewhere while
a step of theirs is computed."""


def _others(line: Sequence[Live]) -> int:
    """How many of a line, or of a step, do not yield: they stand before the others."""
    return bisect_left(line, YIELDS_FROM, key=_by_place)


def _by_place(live: Live) -> int:
    return live.place


class Scheduler:
    """Owns the sequences, their states and the page pool; no other code changes these. A sequence is added, or loaded
    and then added; it takes part in steps (`next_step`, `commit`), and can be dropped in every state."""

    def __init__(self, limits: StepLimits, pool: PagePool, reach: Reach | None = None) -> None:
        """`reach` is that of the model's layers that forget, if it has any."""
        self._limits = limits
        self._pool = pool
        self._reserve = pool.total // _RESERVED
        self.sight = limits.max_batch_tokens + limits.block_size
        """Tokens of a prompt for which embeddings are computed ahead."""
        self._sharing = Sharing(pool, limits.block_size, reach)
        self._outstanding = Outstanding(pool, limits.block_size)
        self._running: list[Live] = []
        self._waiting: list[Live] = []
        self._loading: list[Live] = []
        self._copied = 0
        self._preemptions = 0
        self._generated = 0
        self._decoding: list[Live] | None = None
        """The last step, if it computed one token of every running sequence and these are still the same."""

    def stats(self) -> SchedulerStats:
        """Now."""
        pool, lines = self._pool.stats(), (self._running, self._waiting, self._loading)
        yielding = sum(len(line) - _others(line) for line in lines)
        held = pool.total - pool.free
        if yielding:  # of pages that several share nobody knows here who else does: so they count as others'
            held = min(held, sum(len(live.pages) for line in lines for live in line if not yields(live)))
        return SchedulerStats(
            running=_others(self._running),
            waiting=_others(self._waiting),
            queued_tokens=self._outstanding.tokens,
            loading=len(self._loading),
            yielding=yielding,
            free_pages=pool.free,
            roomy_pages=pool.total - held,
            total_pages=pool.total,
            resident_pages=pool.resident,
            shared_pages=pool.shared,
            copied_tokens=self._copied,
            preemptions=self._preemptions,
            generated_tokens=self._generated,
        )

    @property
    def waiting(self) -> int:
        """Sequences in the line."""
        return len(self._waiting)

    def queued(self, yielding: bool) -> int:
        """Sequences in the line that yield, or that do not."""
        others = _others(self._waiting)
        return len(self._waiting) - others if yielding else others

    @property
    def yielding(self) -> bool:
        """Whether sequences that yield have something to compute."""
        return any(line and yields(line[-1]) for line in (self._running, self._waiting))

    def crowd(self) -> tuple[int, int]:
        """(Sequences whose prompt steps have still to compute, sequences that generate), without those that yield."""
        running = _others(self._running)
        streams = sum(live.remaining == 1 for live in self._running[:running])
        return _others(self._waiting) + running - streams, streams

    # A sequence comes

    def load(self, live: Live) -> None:
        """A source begins to fill the sequence's pages; ends with `loaded` or `drop`."""
        self._decoding = None
        self._rank(live)
        insort(self._loading, live, key=_by_place)

    def next_in_line(self) -> Sequence[Live]:
        """Waiting sequences that may begin with the next step, as far as their number goes: those that yield leave
        their places to others."""
        return self._waiting[: self._limits.max_running - _others(self._running)]

    def load_again(self, live: Live) -> None:
        """A source begins to fill further pages of a sequence in the line; ends with `loaded` or `drop`."""
        self._waiting.remove(live)
        self._outstanding.leave(live)
        self.load(live)

    def room_for(self, live: Live, first_block: int, wanted: int) -> int:
        """Returns how many blocks from `first_block` on a source may fill, at most `wanted`; allocates pages as far as
        they can be spared. One free page for each running sequence stays."""
        last = min(first_block + wanted, self._limits.pages_for(live.length))
        missing = max(0, last - len(live.pages))
        if not yields(live):
            self._clear(missing + len(self._running))
        spare = max(0, self._pool.free - len(self._running) - (self._reserve if yields(live) else 0))
        grow = min(missing, spare)
        if grow:
            self._grow(live, grow)
        return max(0, min(last, len(live.pages)) - first_block)

    def loaded(self, live: Live, blocks: int, result: LoadResult) -> Ended | None:
        """The source is done and has filled the first `blocks` blocks; `result` is not trusted beyond them."""
        self._loading.remove(live)
        live.tokens.extend(token.token for token in result.output)
        size = self._limits.block_size
        valid = self._sharing.reached(live, min(result.valid_tokens, blocks * size, live.given))
        if valid < live.named * size:  # the source has failed; what it shared is found again by its keys
            self._take_pages(live)
            valid = 0
        rest = live.pages[valid // size :]
        self._pool.note_parts(rest, [False] * len(rest))  # they are computed
        plain = result.cached_tokens == result.valid_tokens and not result.output
        live.use_loaded(valid, None if plain else result.cached_tokens, size)
        if result.stored_blocks is not None:
            live.loaded_blocks = min(live.loaded_blocks, result.stored_blocks)
        self._sharing.name(live, live.computed)
        return self.add(live)

    def settled(self, live: Live, blocks: int) -> None:
        """The first `blocks` blocks of a sequence that is being loaded are intact: others may share them."""
        tokens = min(blocks * self._limits.block_size, live.length - 1)
        self._sharing.name(live, tokens)

    def take(self, live: Live, first_block: int, blocks: int, far: int = 0) -> int:
        """Gives a sequence that is being loaded the pages of its blocks from `first_block` to `blocks` that are here
        already, up to the first that is not; returns how many. Of the first `far` blocks the far part is enough."""
        return self._sharing.take(live, first_block, blocks, far)

    def note_parts(self, pages: Sequence[int], far: Sequence[bool]) -> None:
        """Says of pages of a sequence that is being loaded, which have no key, whether a source writes the far part of
        a block alone there."""
        self._pool.note_parts(pages, far)

    def lacking(self, live: Live, blocks: int) -> int:
        """The first block of a sequence that is being loaded whose near part is not there and would be looked at, if it
        went on behind so many blocks; `blocks` when there is none."""
        return self._sharing.lacking(live, blocks)

    def give_back(self, live: Live, first_block: int) -> None:
        """Gives back the pages of a sequence that is being loaded, from a block on."""
        self._pool.release(live.owner, reversed(live.pages[first_block:]))
        del live.pages[first_block:]
        live.pages_changed()
        live.named = min(live.named, first_block)
        live.computed = min(live.computed, first_block * self._limits.block_size)

    def add(self, live: Live) -> Ended | None:
        """Puts a sequence in the line, at its place; not one that its given tokens end already."""
        self._decoding = None
        finish = live.verdict()
        if finish is not None:
            return Ended(live, finish)
        self._rank(live)
        insort(self._waiting, live, key=_by_place)
        self._follow(live)
        return None

    def _rank(self, live: Live) -> None:
        """Gives a sequence that comes its place among those of the same owner that do not run yet: these take their
        places in order of rank. So a priority lets nobody pass a sequence of another owner."""
        owner, rank, own = live.request.owner, live.rank, (yields(live), resumed(live))
        line = (one for one in (*self._waiting, *self._loading) if one.rank > rank and one.request.owner == owner)
        later = [one for one in line if (yields(one), resumed(one)) == own]
        if not later:
            return
        later.sort(key=_by_place)
        moved = [live, *later]
        places = sorted(one.place for one in moved)
        for one, place in zip(moved, places, strict=True):
            one.place = place
        self._waiting.sort(key=_by_place)
        self._loading.sort(key=_by_place)

    # Steps

    def decoding(self) -> list[Live]:
        """Running sequences whose next step can take drafts. Those that yield have none: a step with them is short."""
        return [live for live in self._running[: _others(self._running)] if live.remaining == 1 and not live.busy]

    def seeing(self) -> Live | None:
        """The first, by its place, that lacks embeddings for its next step, of those that run and the next with
        pictures that may begin. So embeddings wait for few."""
        waiting = (live for live in self.next_in_line() if live.pictures is not None)
        lack = (live for live in (*self._running, *islice(waiting, 1)) if live.lacks(self.sight))
        return min(lack, key=_by_place, default=None)

    def next_step(
        self,
        drafts: Mapping[int, tuple[int, ...]],
        stalled: bool = False,
        room: PromptRoom = ANY_ROOM,
        leftover: Leftover = ANY_LEFTOVER,
    ) -> list[Live]:
        """Plans a step and carries the plan out: the sequences that take part, their runs aimed, busy until `commit`.

        `drafts` are proposed tokens by ticket; `stalled`, `room` and `leftover` as in Situation.
        """
        step = self._once_more(leftover) if not drafts else None
        return self._planned(drafts, stalled, room, leftover) if step is None else step

    def _once_more(self, leftover: Leftover = ANY_LEFTOVER) -> list[Live] | None:
        """Repeats the last step one token later: the same answer as `plan` in a fraction of its time. None when `plan`
        would answer differently."""
        step, size = self._decoding, self._limits.block_size
        if step is None:
            return None
        if step and yields(step[-1]):
            lengths = [live.length for live in step if yields(live)]
            beside = len(lengths) < len(step)
            if not leftover.holds(lengths, beside=beside) or (not beside and self._pool.free < self._reserve // 2):
                return None
        if step and step[0].busy:
            return None
        full = []
        for live in step:
            length = len(live.tokens)
            if length - live.computed != 1:
                return None
            if length > len(live.pages) * size:
                full.append(live)
        if len(full) > self._pool.free:
            return None
        for live in full:
            self._grow(live, 1)
        for live in step:
            live.busy = True
            live.run.aim(live.computed, 1, ())
        return step

    def _planned(
        self, drafts: Mapping[int, tuple[int, ...]], stalled: bool, room: PromptRoom, leftover: Leftover
    ) -> list[Live]:
        self._share()
        made = plan(self.situation(drafts, stalled, room, leftover))
        lines = (self._running, self._waiting, self._loading)
        by_ticket = {live.ticket: live for line in lines for live in line}
        for ticket in made.preempt:
            self._preempt(by_ticket[ticket])
        for ticket in made.strip:
            self._strip(by_ticket[ticket])
        for ticket in made.admit:
            self._waiting.remove(by_ticket[ticket])
            insort(self._running, by_ticket[ticket], key=_by_place)
            self._progressed(by_ticket[ticket])
        for portion in made.portions:
            if portion.new_pages:
                self._grow(by_ticket[portion.ticket], portion.new_pages)
        step, single = [], True
        for portion in made.portions:  # once all have their pages: none is taken from those to copy from
            live = by_ticket[portion.ticket]
            assert not live.busy, f"{live.owner} is in two steps"
            assert live.named * self._limits.block_size <= live.computed, f"{live.owner} would write to a shared page"
            live.busy = True
            source, rows = self._sharing.borrow(live) if portion.copied else (None, 0)
            start = live.computed + rows
            known = min(portion.known, live.length - start)
            live.run.aim(start, known, drafts[live.ticket][: portion.drafts] if portion.drafts else (), source)
            single = single and live.run.tokens == 1
            step.append(live)
        everybody = len(step) == len(self._running) and not self._waiting
        self._decoding = step if single and made.settled and (everybody or self._all_others(step)) else None
        return step

    def _all_others(self, step: Sequence[Live]) -> bool:
        """Whether all sequences that do not yield take part, and there is one."""
        others = _others(step)
        return others > 0 and others == _others(self._running) and not _others(self._waiting)

    def _share(self) -> None:
        """Sequences take the pages of blocks that came since the last step: those that run, and in the line those that
        may begin now, so that the others hold nothing back."""
        for live in self._running:
            if not live.busy and self._sharing.advance(live):
                self._progressed(live)
        need, free = len(self._running), self._pool.free
        free += sum(len(live.pages) for live in self._running if yields(live))
        for live in self.next_in_line():
            if self._sharing.advance(live):
                self._follow(live)
            need += max(0, self._limits.pages_for(live.length) - len(live.pages))
            if need > free:
                break

    def _progressed(self, live: Live) -> None:
        """A sequence begins to run, or more of its prompt is computed. Its last token is a decode row."""
        if live.remaining > 1:
            self._follow(live)
        else:
            self._outstanding.leave(live)

    def _follow(self, live: Live) -> None:
        """Counts what is left of a prompt as work that others wait for: nobody waits for one that yields."""
        if not yields(live):
            self._outstanding.follow(live)

    def situation(
        self,
        drafts: Mapping[int, tuple[int, ...]],
        stalled: bool = False,
        room: PromptRoom = ANY_ROOM,
        leftover: Leftover = ANY_LEFTOVER,
    ) -> Situation:
        """All that the next plan depends on."""
        return Situation(
            limits=self._limits,
            free=self._pool.free,
            running=self._running,
            waiting=self._waiting,
            loading=self._loading,
            drafts={ticket: len(tokens) for ticket, tokens in drafts.items()},
            copyable=self._sharing.copyable,
            holds=self._pool.holds,
            stalled=stalled,
            room=room,
            leftover=leftover,
            reserve=self._reserve,
        )

    def commit(self, step: Sequence[Live], answers: Sequence[list[Chosen] | EngineError]) -> list[Ended]:
        """Gives each sequence the tokens that a step has sampled for it, and returns the sequences that have ended.

        Afterwards each answer holds only the tokens that were accepted: tokens behind an end are removed, and all
        tokens of a sequence that was dropped meanwhile. A sequence whose answer is an error stays as it was.
        """
        ended, generated = [], 0
        for live, answer in zip(step, answers, strict=True):
            live.busy = False
            if live.gone:
                if isinstance(answer, NotFinite):
                    self._sharing.forget(live)  # before others can find its pages
                self._take_pages(live)
                if isinstance(answer, list):
                    answer.clear()
            elif isinstance(answer, list):
                finish = live.advance(answer)
                if live.pictures is not None:
                    live.pictures.let_go(live.computed)
                if live.run.sound:
                    self._sharing.name(live, live.computed)
                else:
                    live.chain = None
                if live.run.tail_sound:
                    self._sharing.leave_tail(live)
                if live in self._outstanding:
                    self._progressed(live)
                generated += len(answer)
                if finish is not None:
                    ended.append(Ended(live, finish))
            if live.run.source is not None:
                self._copied += live.run.start % self._limits.block_size
                self._pool.release(live.owner, (live.run.source,))
        self._generated += generated
        return ended

    def distrust(self, live: Live) -> None:
        """Takes the keys of the sequence's pages: its KV may be damaged, so no other sequence may begin to use it."""
        self._sharing.forget(live)

    def drop(self, live: Live) -> None:
        """Removes a sequence for good; may be called more than once. Its pages are freed at once, or in
        `commit` when a step is using them."""
        if live.gone:
            return
        self._decoding = None
        live.gone = True
        self._outstanding.leave(live)
        for line in (self._running, self._waiting, self._loading):
            if live in line:
                line.remove(live)
        if not live.busy:
            self._take_pages(live)

    # Pages

    def hold(self, owner: str, pages: Sequence[int]) -> None:
        """Adds a hold of `owner` to each page, so that no other sequence gets it; the owner must `release` them."""
        self._pool.hold(owner, pages)

    def release(self, owner: str, pages: Iterable[int]) -> None:
        """Ends one hold of `owner` on each page."""
        self._pool.release(owner, pages)

    def shares(self, page: int) -> bool:
        """Whether sequences may share what is in the page, which is a whole and sound block then."""
        return self._pool.named(page)

    def far(self, page: int) -> bool:
        """Whether there is the far part of a block alone in the page."""
        return self._pool.far(page)

    def _grow(self, live: Live, pages: int) -> None:
        live.pages.extend(self._pool.allocate(live.owner, pages))
        live.pages_changed()

    def _preempt(self, live: Live) -> None:
        self._running.remove(live)
        self._take_pages(live)
        live.preemptions += 1
        self._preemptions += 1
        live.set_back()
        insort(self._waiting, live, key=_by_place)
        self._follow(live)

    def _strip(self, live: Live) -> None:
        self._take_pages(live)
        if not live.preemptions:  # else its pages are those of others, and what it computed before counts
            live.forget_loaded()
        if live in self._outstanding:
            self._outstanding.follow(live)

    def _clear(self, pages: int) -> None:
        """Takes pages of sequences that yield and are in no step, until so many are free or there are none left."""
        for live in [*reversed(self._waiting), *reversed(self._running)]:
            if self._pool.free >= pages:
                return
            if yields(live) and live.pages and not live.busy:
                if live in self._waiting:
                    self._strip(live)
                else:
                    self._decoding = None
                    self._preempt(live)

    def _take_pages(self, live: Live) -> None:
        self._pool.release(live.owner, reversed(live.pages))  # so the end of a chain becomes idle before its beginning
        live.pages.clear()
        live.pages_changed()
        live.computed = live.named = 0
