"""The owner of every sequence's tokens and pages: carries out the policy's plans and takes in the tokens of steps."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.engine.errors import EngineError
from penstock.engine.hooks import LoadResult
from penstock.engine.pages import PagePool
from penstock.engine.request import FinishReason
from penstock.engine.sampling.choice import Chosen
from penstock.engine.scheduling.live import Live
from penstock.engine.scheduling.plan import Situation, StepLimits, plan


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that ended normally. It keeps its pages until it is dropped."""

    live: Live
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    running: int
    waiting: int
    loading: int
    queued_tokens: int
    """Known tokens of waiting and running sequences whose KV is still to be computed, decode rows not counted."""
    free_pages: int
    total_pages: int
    preemptions: int
    generated_tokens: int
    """Number of tokens that steps have generated."""


def _by_ticket(live: Live) -> int:
    return live.ticket


class Scheduler:
    """Owns the sequences, their states and the page pool; no other code changes these. A sequence is added, or loaded
    and then added; it takes part in steps (`next_step`, `commit`), and can be dropped in every state."""

    def __init__(self, limits: StepLimits, pool: PagePool) -> None:
        self._limits = limits
        self._pool = pool
        self._running: list[Live] = []
        self._waiting: list[Live] = []
        self._loading: list[Live] = []
        self._preemptions = 0
        self._generated = 0
        self._decoding: list[Live] | None = None
        """The last step, if it computed one token of every running sequence and these are still the same."""

    def stats(self) -> SchedulerStats:
        """Now."""
        behind = [live.remaining for live in self._waiting]
        behind += [live.remaining for live in self._running if live.remaining > 1]
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            loading=len(self._loading),
            queued_tokens=sum(behind),
            free_pages=self._pool.free,
            total_pages=self._pool.total,
            preemptions=self._preemptions,
            generated_tokens=self._generated,
        )

    @property
    def waits(self) -> bool:
        """Whether a sequence is in the line."""
        return bool(self._waiting)

    # A sequence comes

    def load(self, live: Live) -> None:
        """A source begins to fill the sequence's pages; ends with `loaded` or `drop`."""
        self._decoding = None
        insort(self._loading, live, key=_by_ticket)

    def room_for(self, live: Live, first_block: int, wanted: int) -> int:
        """Returns how many blocks from `first_block` on a source may fill, at most `wanted`; allocates pages as far as
        they can be spared. One free page for each running sequence stays."""
        last = min(first_block + wanted, self._limits.pages_for(live.length))
        spare = max(0, self._pool.free - len(self._running))
        grow = min(max(0, last - len(live.pages)), spare)
        if grow:
            self._grow(live, grow)
        return max(0, min(last, len(live.pages)) - first_block)

    def loaded(self, live: Live, blocks: int, result: LoadResult) -> Ended | None:
        """The source is done and has written the first `blocks` blocks; `result` is not trusted beyond them."""
        self._loading.remove(live)
        live.tokens.extend(token.token for token in result.output)
        size = self._limits.block_size
        valid = min(result.valid_tokens, blocks * size, live.given)
        plain = result.cached_tokens == result.valid_tokens and not result.output
        live.use_loaded(valid, None if plain else result.cached_tokens, size)
        return self.add(live)

    def add(self, live: Live) -> Ended | None:
        """Puts a sequence in the line, at its place by arrival; not one that its given tokens end already."""
        self._decoding = None
        finish = live.verdict()
        if finish is not None:
            return Ended(live, finish)
        insort(self._waiting, live, key=_by_ticket)
        return None

    # Steps

    def decoding(self) -> list[Live]:
        """Running sequences whose next step can take drafts."""
        return [live for live in self._running if live.remaining == 1]

    def next_step(
        self, drafts: Mapping[int, tuple[int, ...]], stalled: bool = False, chunk: int | None = None
    ) -> list[Live]:
        """Plans a step and carries the plan out: the sequences that take part, their runs aimed, busy until `commit`.

        `drafts` are proposed tokens by ticket; `stalled` and `chunk` as in Situation.
        """
        step = self._once_more() if not drafts else None
        return self._planned(drafts, stalled, chunk) if step is None else step

    def _once_more(self) -> list[Live] | None:
        """Repeats the last step one token later: the same answer as `plan` in a fraction of its time. None when `plan`
        would answer differently."""
        step, size = self._decoding, self._limits.block_size
        if step is None:
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

    def _planned(self, drafts: Mapping[int, tuple[int, ...]], stalled: bool, chunk: int | None) -> list[Live]:
        made = plan(self.situation(drafts, stalled, chunk))
        lines = (self._running, self._waiting, self._loading)
        by_ticket = {live.ticket: live for line in lines for live in line}
        for ticket in made.preempt:
            self._preempt(by_ticket[ticket])
        for ticket in made.strip:
            self._strip(by_ticket[ticket])
        for ticket in made.admit:
            self._waiting.remove(by_ticket[ticket])
            insort(self._running, by_ticket[ticket], key=_by_ticket)
        step, single = [], True
        for portion in made.portions:
            live = by_ticket[portion.ticket]
            if portion.new_pages:
                self._grow(live, portion.new_pages)
            assert not live.busy, f"{live.owner} is in two steps"
            live.busy = True
            live.run.aim(live.computed, portion.known, drafts[live.ticket][: portion.drafts] if portion.drafts else ())
            single = single and live.run.tokens == 1
            step.append(live)
        self._decoding = step if single and len(step) == len(self._running) and not self._waiting else None
        return step

    def situation(
        self, drafts: Mapping[int, tuple[int, ...]], stalled: bool = False, chunk: int | None = None
    ) -> Situation:
        """All that the next plan depends on."""
        return Situation(
            limits=self._limits,
            free=self._pool.free,
            running=self._running,
            waiting=self._waiting,
            loading=self._loading,
            drafts={ticket: len(tokens) for ticket, tokens in drafts.items()},
            freeable=self._pool.sole,
            stalled=stalled,
            chunk=chunk,
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
                self._take_pages(live)
                if isinstance(answer, list):
                    answer.clear()
            elif isinstance(answer, list):
                finish = live.advance(answer)
                generated += len(answer)
                if finish is not None:
                    ended.append(Ended(live, finish))
        self._generated += generated
        return ended

    def drop(self, live: Live) -> None:
        """Removes a sequence for good; may be called more than once. Its pages are freed at once, or in
        `commit` when a step is using them."""
        if live.gone:
            return
        self._decoding = None
        live.gone = True
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

    def _grow(self, live: Live, pages: int) -> None:
        live.pages.extend(self._pool.allocate(live.owner, pages))
        live.pages_changed()

    def _preempt(self, live: Live) -> None:
        self._running.remove(live)
        self._take_pages(live)
        live.preemptions += 1
        self._preemptions += 1
        insort(self._waiting, live, key=_by_ticket)

    def _strip(self, live: Live) -> None:
        self._take_pages(live)
        live.forget_loaded()

    def _take_pages(self, live: Live) -> None:
        self._pool.release(live.owner, live.pages)
        live.pages.clear()
        live.pages_changed()
        live.computed = 0
