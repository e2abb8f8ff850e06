"""Requests that yield, such as lines of batches: they get places that nobody else wants, and count nowhere.

A worker serves everybody else first in each of its steps, and reports what those who yield have there as free. So their
plans are charged to nobody, and planning for others does not see them. A worker has as many of them as its batch has
places beside the others, and a few more that wait there for the next: then it is never without work, and one that comes
finds no longer a queue than it would without them. Who finds no place is held back here, in fair order between tenants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from msgspec.structs import replace

from penstock.errors import Internal, Overloaded, PenstockError
from penstock.router.fair import FairQueue
from penstock.router.line import HeldAsk
from penstock.router.planner import Planner
from penstock.router.plans import PlanAsk, Planned
from penstock.router.refusals import refuse_without_seats
from penstock.router.registry import Seat
from penstock.router.running import RunningPlan

_MOST_TRIES = 16
"""Of one turn: others have the event loop between two."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """The places of one plan."""

    prefill: str
    """Empty: the prompt is computed, or the one that decodes computes it."""
    decode: str


class YieldingLine:
    """Owner of the places of requests that yield, and of those that wait for one. Every method is synchronous, and of
    the same meaning as that of `WaitingLine`; numbers of plans are below 0."""

    def __init__(self, planner: Planner, clock: Callable[[], float], *, most_held: int, most_live: int) -> None:
        self._planner = planner
        self._clock = clock
        self._most_held = most_held
        self._most_live = most_live
        self._queues: dict[str, FairQueue[HeldAsk]] = {}
        """By model."""
        self._taken: dict[int, _Taken] = {}
        self._decoding: Counter[str] = Counter()
        self._prefilling: Counter[str] = Counter()
        """Places by member."""
        self._next = 0
        self._log = structlog.get_logger("penstock.router")

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def live(self) -> int:
        """Plans that have places."""
        return len(self._taken)

    def enter(self, ask: PlanAsk, told: Callable[[], None] = lambda: None) -> Planned | HeldAsk:
        """Places a request at once, or holds it back; then the caller owes one `leave`. Raises PenstockError when it is
        refused."""
        queue = self._queues.get(ask.model)
        if queue is None and (found := self._place(ask)) is not None:
            return found
        if len(self) >= self._most_held:
            what = f"{len(self)} requests that yield wait already"
            raise Overloaded(what, code="queue_full", retry_after=1.0)
        held, cost = HeldAsk(ask, self._clock(), told), ask.prompt_tokens + ask.max_tokens
        queue = self._queues.setdefault(ask.model, FairQueue())
        held.entry = queue.push(held, ask.tenant, rank=held.entered_at + ask.priority, cost=cost, weight=ask.weight)
        return held

    def leave(self, held: HeldAsk) -> None:
        """The request is not wanted any more, or its outcome is known to who asked."""
        entry, held.entry = held.entry, None
        if entry is not None:
            queue = self._queues[held.ask.model]
            queue.remove(entry)
            self._forget(held.ask.model, queue)

    def turn(self) -> bool:
        """Places those for whom there are places now; whether there is more to do."""
        tries = 0
        for model, queue in list(self._queues.items()):
            while len(queue) and tries < _MOST_TRIES:
                tries += 1
                entry = next(queue.order())
                outcome = self._try(entry.item)
                if outcome is None:
                    break
                queue.serve(entry, entry.cost)
                entry.item.entry = None
                entry.item.settle(outcome)
            self._forget(model, queue)
        return tries >= _MOST_TRIES

    def keep(self, kept: RunningPlan) -> int:
        """Names what another router has planned; the caller owes one `release`."""
        return self._take(_Taken(kept.prefill, kept.decode))

    def prefilled(self, number: int) -> None:
        """The prompt is computed."""
        taken = self._taken[number]
        _lower(self._prefilling, taken.prefill)
        self._taken[number] = _Taken("", taken.decode)

    def release(self, number: int) -> None:
        """Gives the plan's places back."""
        self.prefilled(number)
        _lower(self._decoding, self._taken.pop(number).decode)

    def _try(self, held: HeldAsk) -> Planned | PenstockError | None:
        ask = held.ask
        try:
            found = self._place(ask)
        except PenstockError as error:
            return error
        except Exception:  # of this request alone: those behind it have their turn
            self._log.exception("a request that yields can't be planned")
            return Internal("internal error")
        return found and replace(found, held_s=self._clock() - held.entered_at)

    def _place(self, ask: PlanAsk) -> Planned | None:
        """None: nobody has a place. Raises PenstockError."""
        if self.live >= self._most_live:
            return None
        self._planner.refresh()
        registry = self._planner.registry
        workers = registry.workers(ask.model, self._clock())
        decoders = [seat for seat in workers if seat.decodes]
        if not decoders:
            refuse_without_seats(registry, ask.model)
        full = {seat.member.id for seat in decoders if not self._roomy(seat, self._decoding)}
        if len(full) == len(decoders):
            return None
        full |= {seat.member.id for seat in workers if not seat.decodes and not self._roomy(seat, self._prefilling)}
        found = self._planner.plan_aside(replace(ask, avoid=ask.avoid | full, full=ask.full | full))
        if found is None or found.decode.id in full:
            return None
        taken = _Taken(found.prefill.id if found.prefill else "", found.decode.id)
        return replace(found, number=self._take(taken))

    def _roomy(self, seat: Seat, taken: Counter[str]) -> bool:
        """Whether a worker has a place that nobody else has."""
        member, mine = seat.member, taken[seat.member.id]
        if member.routers > 1:  # others place theirs there too; what it reports may be a moment old
            mine = max(mine, seat.report.yielding)
        state = self._planner.state(member.id)
        places = member.max_running - (min(state.sequences, member.max_running) if state else 0)
        return mine < places + max(1, member.max_running // 8)

    def _take(self, taken: _Taken) -> int:
        self._next -= 1
        self._taken[self._next] = taken
        self._decoding[taken.decode] += 1
        if taken.prefill:
            self._prefilling[taken.prefill] += 1
        return self._next

    def _forget(self, model: str, queue: FairQueue[HeldAsk]) -> None:
        if not len(queue):
            self._queues.pop(model, None)


def _lower(counts: Counter[str], member: str) -> None:
    if member:
        counts[member] -= 1
        if counts[member] <= 0:
            del counts[member]
