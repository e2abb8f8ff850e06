"""Requests that are held back until their workers have room, in fair order between tenants.

Who would only wait at a worker waits here instead, where what is best for it may still change, and where a tenant's
flood stands behind the others' requests. A worker that somebody waits for is closed to those behind in the order, so
that small requests do not overtake a big one for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import structlog
from msgspec.structs import replace

from penstock.errors import Internal, Overloaded, PenstockError
from penstock.router.config import RouterConfig
from penstock.router.demand import OPEN, Closed, HeldWork
from penstock.router.fair import Entry, FairQueue
from penstock.router.options import Waits
from penstock.router.planner import Planner
from penstock.router.plans import PlanAsk, Planned
from penstock.router.refusals import queue_full, unmet
from penstock.router.workers import WorkerState

TICK_S = 0.25
"""Without anything that stirs it a line has a turn after so long."""
TURN_S = 0.005
"""Between two turns, at least."""
_AGAIN_S = 1.0
"""A request is tried again after so long, even when nothing has changed where it waits."""
_FIRST = 16
"""Those in front that are."""
_MOST_TRIES = 16
"""Of one turn: others have the event loop between two."""
_KEY_BYTES = 80
"""Of memory, for each block key."""
_PRIOR_S = 1.0
_MEMORY_S = 10.0


@dataclass(slots=True, eq=False)
class HeldAsk:
    """One request that is held back, until `outcome` is there."""

    ask: PlanAsk
    entered_at: float
    told: Callable[[], None]
    """Called once, when there is an outcome."""
    wait_s: float = 0.0
    """Predicted when it came."""
    outcome: Planned | PenstockError | None = None
    base: str = ""
    """The model in whose line it stands: that of an adapter has the same workers."""
    entry: Entry[HeldAsk] | None = None
    """Its place; None: it has none any more."""
    at: str = ""
    """The worker that had no room for it."""
    holds: HeldWork = field(default_factory=HeldWork)
    """What that one will do for it."""
    seen: WorkerState | None = None
    """What was known of that worker then."""
    tried_at: float = 0.0

    @property
    def late_at(self) -> float:
        """When its first token would come too late."""
        return self.entered_at + self.ask.first_token_s

    def over_at(self, most_s: float) -> float:
        """When it has waited too long, where nobody waits for more than `most_s`."""
        return min(self.late_at, self.entered_at + most_s)

    @property
    def bytes(self) -> int:
        """Of memory, about."""
        return _KEY_BYTES * len(self.ask.block_keys)

    def settle(self, outcome: Planned | PenstockError) -> None:
        """Ends its waiting."""
        self.outcome = outcome
        self.told()


@dataclass(slots=True)
class _Pace:
    """How many tokens per second leave a line, while there is one; newer ones count more."""

    tokens: float
    seconds: float
    at: float

    @property
    def per_second(self) -> float:
        """Until one left last: how long the next takes is not known."""
        return self.tokens / self.seconds

    def served(self, tokens: float, now: float) -> None:
        """So many have left."""
        took = max(0.0, now - self.at)
        kept = 0.5 ** (took / _MEMORY_S)
        self.tokens, self.seconds, self.at = self.tokens * kept + tokens, self.seconds * kept + took, now


@dataclass(slots=True)
class _ModelLine:
    """Those that wait for workers of one model, with and without adapters."""

    pace: _Pace
    queue: FairQueue[HeldAsk] = field(default_factory=FairQueue)
    blocked: dict[str, HeldWork] = field(default_factory=dict)
    """Workers that somebody waits for, and what they will do for all of those."""
    over_at: float = inf
    """Nobody has waited too long before then."""
    _waiting: Counter[str] = field(default_factory=Counter)
    """How many wait for each worker."""

    def block(self, held: HeldAsk) -> None:
        """One more waits for a worker."""
        _close(self.blocked, held)
        self._waiting[held.at] += 1

    def unblock(self, held: HeldAsk) -> None:
        """It does not any more."""
        self._waiting[held.at] -= 1
        if self._waiting[held.at]:
            self.blocked[held.at] = self.blocked[held.at].minus(held.holds)
        else:
            del self._waiting[held.at], self.blocked[held.at]


class WaitingLine:
    """Owner of the requests that are held back. Every method is synchronous, and time is what the clock says: so it
    serves a router, which gives it its turns from a task, and a simulation, which makes up the time."""

    def __init__(self, planner: Planner, config: RouterConfig, clock: Callable[[], float]) -> None:
        self._planner = planner
        self._config = config
        self._clock = clock
        self._lines: dict[str, _ModelLine] = {}
        self._count = self._bytes = 0
        self._log = structlog.get_logger("penstock.router")

    def __len__(self) -> int:
        return self._count

    def enter(self, ask: PlanAsk, told: Callable[[], None] = lambda: None) -> Planned | HeldAsk:
        """Places a request at once, or holds it back; then the caller owes one `leave`. Raises PenstockError when it is
        refused."""
        line = self._lines.get(self._planner.registry.base(ask.model))
        found = self._planner.try_plan(ask, line.blocked if line else OPEN)
        return found if isinstance(found, Planned) else self._hold(ask, found, told)

    def leave(self, held: HeldAsk) -> None:
        """The request is not wanted any more, or its outcome is known to who asked."""
        if held.entry is not None:
            self._take_out(held)

    def turn(self) -> bool:
        """Places those whose turn has come, and refuses those that have waited too long. Whether there is more to
        do."""
        return sum(map(self._turn, list(self._lines.values()))) > 0

    def _hold(self, ask: PlanAsk, found: Waits, told: Callable[[], None]) -> HeldAsk:
        now, base = self._clock(), self._planner.registry.base(ask.model)
        held = HeldAsk(ask, now, told, base=base)
        self._note(held, found, now)
        most_s = self._config.max_queue_s
        line = self._lines.get(base)
        rate = self._planner.prefill_rate(ask.model)
        pace = line.pace if line else _Pace(rate * _PRIOR_S, _PRIOR_S, now)
        rank, cost = now + ask.priority, max(1.0, found.cost)
        ahead = line.queue.ahead(ask.tenant, rank, ask.weight) if line else 0.0
        held.wait_s = ahead / pace.per_second
        chosen = found.decision.chosen
        wait_s = held.wait_s + chosen.prompt.queue_s
        first_s = held.wait_s + chosen.first_token_s - chosen.prompt.ahead_s  # those ahead are counted in the wait
        if wait_s > most_s:
            raise queue_full(wait_s, most_s)
        if first_s > ask.first_token_s:
            raise unmet(ask, "first_token", first_s)
        self._make_room(held)
        line = self._lines.setdefault(base, _ModelLine(pace))
        if not len(line.queue):
            line.pace.at = now
        held.entry = line.queue.push(held, ask.tenant, rank=rank, cost=cost, weight=ask.weight)
        line.block(held)
        line.over_at = min(line.over_at, held.over_at(most_s))
        self._count += 1
        self._bytes += held.bytes
        return held

    def _make_room(self, held: HeldAsk) -> None:
        """Lets the one go that can best be done without, when there are too many. Raises Overloaded when that is the
        new one."""
        config, ask = self._config, held.ask
        while self._count >= config.max_held or self._bytes + held.bytes > config.max_held_bytes:
            full = Overloaded(f"{self._count} requests wait already", code="queue_full", retry_after=1.0)
            if not self._count or held.bytes > config.max_held_bytes:
                raise full
            longest = max(self._lines.values(), key=lambda line: len(line.queue)).queue
            last = longest.surplus().item
            own = self._lines[held.base].queue.waiting(ask.tenant) if held.base in self._lines else 0
            if (own + 1) / ask.weight >= longest.waiting(last.ask.tenant) / last.ask.weight:
                raise full
            self._take_out(last)
            last.settle(full)

    def _turn(self, line: _ModelLine) -> bool:
        now, closed, tries = self._clock(), dict[str, HeldWork](), 0
        self._planner.refresh()
        for held in self._over(line, now):
            self._take_out(held)
            late = now >= held.late_at
            waited = now - held.entered_at
            held.settle(
                unmet(held.ask, "first_token", waited) if late else queue_full(waited, self._config.max_queue_s)
            )
        tried: set[HeldAsk] = set()
        placed = True
        while placed and tries < _MOST_TRIES and not self._planner.full:  # else all would be refused
            placed = False
            closed = {}
            for number, entry in enumerate(line.queue.order()):
                if number >= _FIRST and len(closed) == len(line.blocked):
                    break  # those behind wait for workers that are closed to them
                held = entry.item
                if held in tried or not self._hopeful(held, closed, now, front=number < _FIRST):
                    _close(closed, held)
                    continue
                if tries >= _MOST_TRIES:
                    break
                tries += 1
                tried.add(held)
                found = self._try(held, closed, now)
                if isinstance(found, Waits):
                    line.unblock(held)
                    self._note(held, found, now)
                    line.block(held)
                    _close(closed, held)
                    continue
                if isinstance(found, Planned):
                    found = replace(found, held_s=now - held.entered_at)
                    cost = found.uncached_tokens + found.expected_output
                    line.pace.served(cost, now)
                    line.queue.serve(entry, cost)
                    self._forget(held)
                else:
                    self._take_out(held)
                held.settle(found)
                placed = True
                break
        return tries >= _MOST_TRIES

    def _over(self, line: _ModelLine, now: float) -> list[HeldAsk]:
        if now < line.over_at:
            return []
        ends = [(entry.item.over_at(self._config.max_queue_s), entry.item) for entry in line.queue.order()]
        line.over_at = min((at for at, _ in ends if at > now), default=inf)
        return [held for at, held in ends if at <= now]

    def _hopeful(self, held: HeldAsk, closed: Closed, now: float, *, front: bool) -> bool:
        """Whether it may find room now."""
        if front and now - held.tried_at >= _AGAIN_S:
            return True
        if held.at in closed:
            return False
        state = self._planner.state(held.at)
        if state is None:
            return True
        if state is held.seen or state.batch_full or state.queue_s > self._config.hold_s:
            return False
        return not state.sequences or state.context_tokens + held.holds.context_tokens <= state.kv_capacity_tokens

    def _try(self, held: HeldAsk, closed: Closed, now: float) -> Planned | Waits | PenstockError:
        ask = held.ask
        if ask.first_token_s < inf:
            ask = replace(ask, first_token_s=held.late_at - now)
        try:
            found = self._planner.try_plan(ask, closed)
        except PenstockError as error:
            return error
        except Exception:  # of this request alone: those behind it have their turn
            self._log.exception("a request that was held back can't be planned")
            return Internal("internal error")
        return found

    def _note(self, held: HeldAsk, found: Waits, now: float) -> None:
        """It waits there."""
        held.at, held.holds, held.seen, held.tried_at = found.at, found.holds, self._planner.state(found.at), now

    def _take_out(self, held: HeldAsk) -> None:
        assert held.entry is not None, "it has a place"
        self._lines[held.base].queue.remove(held.entry)
        self._forget(held)

    def _forget(self, held: HeldAsk) -> None:
        held.entry = None
        self._count -= 1
        self._bytes -= held.bytes
        line = self._lines[held.base]
        line.unblock(held)
        if not len(line.queue):
            del self._lines[held.base]


def _close(closed: dict[str, HeldWork], held: HeldAsk) -> None:
    """The worker that a request waits for is closed to those behind it, who would come after it there."""
    before = closed.get(held.at)
    closed[held.at] = held.holds if before is None else before.plus(held.holds)
