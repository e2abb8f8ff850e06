"""Carries out what the policy in `plan` says."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping

from penstock.engine.pages import PagePool
from penstock.engine.scheduling.live import Live
from penstock.engine.scheduling.plan import Portion, Situation, StepLimits, plan


def _by_ticket(live: Live) -> int:
    return live.ticket


class Scheduler:
    """Owner of the lines and of every sequence's pages."""

    def __init__(self, limits: StepLimits, pool: PagePool) -> None:
        self.limits = limits
        self.pool = pool
        self.running: list[Live] = []
        self.waiting: list[Live] = []
        self.loading: list[Live] = []
        self.preemptions = 0
        self._decoding: list[tuple[Live, Portion]] | None = None
        """The last step, when it was nothing but a token for each that runs, and nobody has come or gone since."""

    def load(self, live: Live) -> None:
        """A source begins to fill the sequence's pages; ends with `add` or `drop`."""
        self._decoding = None
        insort(self.loading, live, key=_by_ticket)

    def add(self, live: Live) -> None:
        """Puts a sequence (whose loaded pages come with it) in the line, at its place by arrival."""
        self._decoding = None
        if live in self.loading:
            self.loading.remove(live)
        insort(self.waiting, live, key=_by_ticket)

    def decoding(self) -> list[Live]:
        """Running sequences whose next step can take drafts."""
        return [live for live in self.running if live.remaining == 1]

    def next_step(
        self, drafts: Mapping[int, int], stalled: bool = False, chunk: int | None = None
    ) -> list[tuple[Live, Portion]]:
        """Plans a step, carries the plan out and marks its sequences busy until `settle`."""
        step = self._once_more() if not drafts else None
        if step is None:
            step = self._planned(drafts, stalled, chunk)
        for live, _ in step:
            assert not live.busy, f"{live.owner} is in two steps"
            live.busy = True
        return step

    def _once_more(self) -> list[tuple[Live, Portion]] | None:
        """The last step again, one token later: what `plan` would say, in a fraction of its time. None where it
        would say something else."""
        step, size = self._decoding, self.limits.block_size
        if step is None:
            return None
        full = []
        for live, _ in step:
            length = len(live.tokens)
            if length - live.computed != 1:
                return None
            if length > len(live.pages) * size:
                full.append(live)
        if len(full) > self.pool.free:
            return None
        for live in full:
            self.grow(live, 1)
        return step

    def _planned(self, drafts: Mapping[int, int], stalled: bool, chunk: int | None) -> list[tuple[Live, Portion]]:
        lines = (self.running, self.waiting, self.loading)
        situation = Situation(self.limits, self.pool.free, *lines, drafts, self.pool.sole, stalled, chunk)
        made = plan(situation)
        by_ticket = {live.ticket: live for line in lines for live in line}
        for ticket in made.preempt:
            self._preempt(by_ticket[ticket])
        for ticket in made.strip:
            self._strip(by_ticket[ticket])
        for ticket in made.admit:
            self.waiting.remove(by_ticket[ticket])
            insort(self.running, by_ticket[ticket], key=_by_ticket)
        step = [(by_ticket[portion.ticket], portion) for portion in made.portions]
        for live, portion in step:
            if portion.new_pages:
                self.grow(live, portion.new_pages)
        alike = len(step) == len(self.running) and all(
            portion.known == 1 and not portion.drafts for portion in made.portions
        )
        self._decoding = step if alike and not self.waiting else None
        return step

    def grow(self, live: Live, pages: int) -> None:
        live.pages.extend(self.pool.allocate(live.owner, pages))
        live.version += 1

    def _preempt(self, live: Live) -> None:
        self.running.remove(live)
        self._take_pages(live)
        live.preemptions += 1
        self.preemptions += 1
        self.add(live)

    def _strip(self, live: Live) -> None:
        self._take_pages(live)
        live.forget_loaded()

    def _take_pages(self, live: Live) -> None:
        self.pool.release(live.owner, live.pages)
        live.pages.clear()
        live.version += 1
        live.computed = 0

    def drop(self, live: Live) -> None:
        """Takes a sequence out for good. Its pages go at once, or in `settle` when a step is using them."""
        self._decoding = None
        live.gone = True
        for line in (self.running, self.waiting, self.loading):
            if live in line:
                line.remove(live)
        if not live.busy:
            self._take_pages(live)

    def settle(self, live: Live) -> None:
        """The step that used the sequence is over."""
        live.busy = False
        if live.gone:
            self._take_pages(live)
