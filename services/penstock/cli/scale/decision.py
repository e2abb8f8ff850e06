"""Which workers a mesh is to have next: what was seen and what is remembered in, actions out. No clock, no await.

Prompts and answers are planned apart. What each needs (`needs.py`) is asked for the load that is expected while a new
worker would start (`forecast.py`), and for what waits already. Then, in this order:

1. a role that lacks workers gets back those that are being drained, of the other role too;
2. then those that the other role has had to spare for `flip_after_s`: changing a role costs nothing and takes no time;
3. then new ones.
4. A role that has had workers to spare for `down_after_s`, however its need went up and down meanwhile, loses them, the
   least busy first: they drain, and are removed when nothing runs there any more. Of a load whose period is known
   `flip_after_s` is enough, as the need says what comes next.

So more is done at once and less is done late, and what was done for one reason is not undone for the opposite one
within `cool_s`: a steady load comes to rest. Nothing goes below `least` or above `most`, nor below the workers whose
places the running answers fill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, sqrt
from typing import Literal

from penstock.cli.scale.forecast import LoadHistory, level, peak, period_of, seen
from penstock.cli.scale.needs import SloTargets, WorkerPace, decode_workers, prefill_workers

WorkRole = Literal["prefill", "decode"]
ROLES: tuple[WorkRole, WorkRole] = ("prefill", "decode")
OTHER: Mapping[WorkRole, WorkRole] = {"prefill": "decode", "decode": "prefill"}
ActionKind = Literal["undrain", "flip", "add", "drain", "remove"]

_STRAINED = 1.15
"""How much more load is planned for after targets were missed with as many workers as the plan wanted."""
_MOST_STRAIN = 2.0
_RELAXED_S = 6 * 3600.0
"""After so many seconds in which they are met, half of that is left: long, as who gives the worker back too soon needs
it again."""
JUDGED_S = 60.0
"""Requests that ended within so many seconds say whether targets are met."""
_ENOUGH = 20
"""Requests by which targets are judged."""
_HURRY = 1.5
"""Workers that make up for what waits are at most so many times those that the load needs anyway."""
_WAITS = 0.5
"""Of the TTFT target, prompts may wait so long."""
_WINDOW, _SHORT = 6, 2
"""Looks over which running answers are averaged: the mean over more of them, or the newest where these are more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleKnobs:
    """What an operator sets."""

    targets: SloTargets
    least: Mapping[WorkRole, int]
    most: Mapping[WorkRole, int]
    every_s: float = 5.0
    """Between two looks."""
    start_s: float = 30.0
    """Until a new worker is ready."""
    down_after_s: float = 60.0
    flip_after_s: float = 15.0
    cool_s: float = 60.0
    idle_s: float = 5.0
    """A drained worker is removed when nothing has run there for so long: requests that were planned for it before may
    be on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeen:
    """A worker of the mesh."""

    id: str
    role: WorkRole
    ready: bool
    """It gets new work; else it drains, or is silent."""
    draining: bool = False
    busy: int = 0
    """Sequences that run and wait there."""
    removable: bool = True
    """The actuator can take it away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSeen:
    """One look at a mesh. Rates are those since the look before."""

    at: float
    requests_per_s: float
    prompt_tokens_per_s: float
    """To be computed, those that wait among them."""
    answer_tokens_per_s: float
    """That those requests will have, if they are like those before them."""
    backlog_tokens: float
    """Of prompts, to be computed before anything new."""
    sequences: float
    """Answers that run and wait on decode workers."""
    kv_used: float
    """In decode workers whose memory it fills."""
    pace: WorkerPace
    workers: Sequence[WorkerSeen]
    starting: Mapping[WorkRole, int]
    """Ordered, and not there yet."""
    judged: int = 0
    """Requests of late, of which the shares below met their targets."""
    ttft_met: float = 1.0
    itl_met: float = 1.0
    can_add: bool = True
    """The actuator works."""

    def having(self, role: WorkRole) -> list[WorkerSeen]:
        """Those of a role that get new work."""
        return [one for one in self.workers if one.role == role and one.ready]

    def count(self, role: WorkRole) -> int:
        """Those, and those that start."""
        return len(self.having(role)) + self.starting.get(role, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleAction:
    """One thing to do, and why."""

    kind: ActionKind
    role: WorkRole
    """That the worker has afterwards."""
    worker: str = ""
    """Its id; empty: a new one."""
    reason: str


@dataclass(frozen=True, slots=True)
class _Want:
    at: float
    count: int


def _each(value: float) -> dict[WorkRole, float]:
    return dict.fromkeys(ROLES, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleMemory:
    """What is remembered from one look to the next."""

    at: float = -inf
    prompts: LoadHistory = field(default_factory=LoadHistory)
    answers: LoadHistory = field(default_factory=LoadHistory)
    sequences: tuple[float, ...] = ()
    wants: Mapping[WorkRole, tuple[_Want, ...]] = field(default_factory=dict)
    """Of the last `down_after_s`, the newest last."""
    strain: Mapping[WorkRole, float] = field(default_factory=lambda: _each(1.0))
    """As so many times its load each role is planned for."""
    strained_at: Mapping[WorkRole, float] = field(default_factory=lambda: _each(-inf))
    missed_at: Mapping[WorkRole, float] = field(default_factory=lambda: _each(inf))
    """Since when the target of a role has been missed at every look; inf: it was met at the last one."""
    raised_at: Mapping[WorkRole, float] = field(default_factory=lambda: _each(-inf))
    """When a role last got a worker."""
    lowered_at: Mapping[WorkRole, float] = field(default_factory=lambda: _each(-inf))
    leaving: Mapping[str, float] = field(default_factory=dict)
    """Workers that drain because this said so, and when they were last busy; those that somebody else drains are left
    alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDecision:
    """What to do, and what it was derived from."""

    actions: Sequence[ScaleAction]
    want: Mapping[WorkRole, int]
    why: Mapping[WorkRole, str]


def decide(mesh: MeshSeen, memory: ScaleMemory, knobs: ScaleKnobs) -> tuple[ScaleDecision, ScaleMemory]:
    """What to do now, and what to remember until the next look."""
    memory = _remembered(mesh, memory, knobs)
    needed, why = _needed(mesh, memory, knobs)
    want = {role: min(max(needed[role], knobs.least[role], 1), knobs.most[role]) for role in ROLES}
    wants = {
        role: (
            *(one for one in memory.wants.get(role, ()) if mesh.at - one.at < knobs.down_after_s),
            _Want(mesh.at, want[role]),
        )
        for role in ROLES
    }
    memory = replace(memory, wants=wants)
    moves = _Moves(mesh, memory, knobs, want, why)
    moves.raise_all()
    moves.lower_all()
    moves.remove()
    return ScaleDecision(actions=moves.actions, want=want, why=why), moves.memory


def _remembered(mesh: MeshSeen, memory: ScaleMemory, knobs: ScaleKnobs) -> ScaleMemory:
    passed = mesh.at - memory.at
    looks = 1 if passed == inf else max(1, round(passed / knobs.every_s))
    memory = _strained(mesh, memory, knobs, min(passed, knobs.every_s * looks))
    return replace(
        memory,
        at=mesh.at,
        prompts=seen(memory.prompts, mesh.prompt_tokens_per_s, mesh.requests_per_s * knobs.every_s, looks),
        answers=seen(memory.answers, mesh.answer_tokens_per_s, mesh.requests_per_s * knobs.every_s, looks),
        sequences=(*memory.sequences, mesh.sequences)[-_WINDOW:],
        leaving={
            one.id: mesh.at if one.busy else memory.leaving[one.id]
            for one in mesh.workers
            if one.draining and one.id in memory.leaving
        },
    )


def _strained(mesh: MeshSeen, memory: ScaleMemory, knobs: ScaleKnobs, passed_s: float) -> ScaleMemory:
    """Targets that are missed although there are as many workers as were wanted, for as long as it takes to show, say
    that the workers do less than is thought."""
    strain, since, missed = dict(memory.strain), dict(memory.strained_at), dict(memory.missed_at)
    shares: Mapping[WorkRole, float] = {"prefill": mesh.ttft_met, "decode": mesh.itl_met}
    for role, met in shares.items():
        if mesh.judged < _ENOUGH or role not in memory.wants:
            continue
        if not _missed(met, mesh.judged, knobs.targets.share):
            missed[role] = inf
            strain[role] = 1 + (strain[role] - 1) * 0.5 ** (max(0.0, passed_s) / _RELAXED_S)
            continue
        missed[role] = inf if _makes_up(mesh, knobs) else min(missed[role], mesh.at)
        if mesh.at - missed[role] >= JUDGED_S and _settled(mesh, memory, knobs, role):
            strain[role] = min(_MOST_STRAIN, strain[role] * _STRAINED)
            since[role] = mesh.at
    return replace(memory, strain=strain, strained_at=since, missed_at=missed)


def _makes_up(mesh: MeshSeen, knobs: ScaleKnobs) -> bool:
    """Whether so many prompts wait that targets are missed for that reason."""
    rate = max(1, len(mesh.having("prefill"))) * mesh.pace.prefill_rate
    return mesh.backlog_tokens > _WAITS * knobs.targets.ttft_s * rate


def _missed(met: float, judged: int, share: float) -> bool:
    """Whether fewer met a target than should, by more than chance explains."""
    return (share - met) * judged > 2 * sqrt(judged * share * (1 - share))


def _settled(mesh: MeshSeen, memory: ScaleMemory, knobs: ScaleKnobs, role: WorkRole) -> bool:
    """Whether a role has had the workers that it wanted for so long that what is seen comes of it."""
    since = max(memory.strained_at[role], memory.raised_at[role] + knobs.start_s, memory.lowered_at[role])
    shows_s = JUDGED_S + knobs.cool_s
    late = [one.count for one in memory.wants[role] if mesh.at - one.at < shows_s]
    return mesh.at - since >= shows_s and len(mesh.having(role)) >= max(late, default=0)


def _needed(mesh: MeshSeen, memory: ScaleMemory, knobs: ScaleKnobs) -> tuple[dict[WorkRole, int], dict[WorkRole, str]]:
    """Workers of each role, and the figures behind them."""
    ahead, pace, targets = ceil((knobs.start_s + knobs.every_s) / knobs.every_s) + 1, mesh.pace, knobs.targets
    requests = level(replace(memory.prompts, work=memory.prompts.requests)) / knobs.every_s
    prompts, soon = level(memory.prompts), peak(memory.prompts, ahead)
    strain = memory.strain
    own = prompts / requests if requests > 0 else 0.0
    expected = strain["prefill"] * max(prompts, soon)
    count = prefill_workers(expected, max(requests, expected / own) if own else 0.0, pace, targets)
    late, left_s = _late(mesh, strain["prefill"] * prompts, knobs)
    late = min(late, ceil(_HURRY * count))
    why: dict[WorkRole, str] = {
        "prefill": f"{prompts:,.0f} prompt tokens/s, {soon:,.0f} expected, {mesh.backlog_tokens:,.0f} wait"
        f" ({left_s:.2f} s left of them when a new worker would be ready)"
    }
    answers, later = level(memory.answers), peak(memory.answers, ahead)
    running = max(_mean(memory.sequences), _mean(memory.sequences[-_SHORT:]))
    decode = decode_workers(strain["decode"] * max(answers, later), running, mesh.kv_used, pace, targets)
    why["decode"] = (
        f"{answers:,.0f} answer tokens/s, {later:,.0f} expected, {running:.1f} answers run or wait,"
        f" {pace.places(targets.itl_s)} places a worker"
    )
    return {"prefill": max(count, late), "decode": decode}, why


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _late(mesh: MeshSeen, tokens_per_s: float, knobs: ScaleKnobs) -> tuple[int, float]:
    """Workers that make up, within as long again, for the prompts that will wait too long when a new one is ready; and
    the seconds for which those prompts, and all that will wait then, would keep the present ones busy."""
    count, rate, horizon_s = max(1, mesh.count("prefill")), mesh.pace.prefill_rate, knobs.start_s + knobs.every_s
    left_s = max(0.0, mesh.backlog_tokens + (tokens_per_s - count * rate) * horizon_s) / (count * rate)
    too_long = (left_s - _WAITS * knobs.targets.ttft_s) * count * rate
    clear_s = max(knobs.targets.ttft_s, knobs.start_s)
    return (ceil((tokens_per_s + too_long / clear_s) / rate - 1e-9) if too_long > 0 else 0), left_s


class _Moves:
    """The actions of one decision."""

    def __init__(
        self,
        mesh: MeshSeen,
        memory: ScaleMemory,
        knobs: ScaleKnobs,
        want: Mapping[WorkRole, int],
        why: Mapping[WorkRole, str],
    ) -> None:
        self.actions: list[ScaleAction] = []
        self.memory = memory
        self._mesh, self._knobs, self._want, self._why = mesh, knobs, want, why
        self._have = {role: mesh.count(role) for role in ROLES}
        self._left = {role: sorted(mesh.having(role), key=lambda one: (one.busy, one.id)) for role in ROLES}
        """Those that may still be taken, the least busy first."""

    def raise_all(self) -> None:
        """Workers for the roles that lack some."""
        for role in ROLES:
            lacking = self._want[role] - self._have[role]
            if lacking > 0:
                lacking -= self._undrain(role, role, lacking)
                lacking -= self._undrain(role, OTHER[role], lacking)
                lacking -= self._flip(role, lacking)
                self._add(role, lacking)

    def lower_all(self) -> None:
        """Drains those that have been too many for long enough."""
        for role in ROLES:
            down_s = self._down_s(role)
            spare = self._have[role] - self._calm(role, down_s)
            if self._mesh.starting.get(role, 0) or not self._may_lower(role):
                continue
            for _ in range(spare):
                if not self._drain(role, down_s):
                    break

    def remove(self) -> None:
        """Those on which nothing runs any more."""
        for one in self._mesh.workers:
            idle_s = self._mesh.at - self.memory.leaving.get(one.id, inf)
            if one.draining and not one.busy and idle_s >= self._knobs.idle_s:
                self.actions.append(ScaleAction(kind="remove", role=one.role, worker=one.id, reason="it is drained"))

    def _undrain(self, role: WorkRole, those_of: WorkRole, most: int) -> int:
        """Brings back workers that drain, of the other role too: those change it."""
        draining = [one for one in self._mesh.workers if one.role == those_of and one.id in self.memory.leaving]
        for one in sorted(draining, key=lambda one: (-one.busy, one.id))[:most]:
            left = {id: at for id, at in self.memory.leaving.items() if id != one.id}
            self.memory = replace(self.memory, leaving=left)
            if those_of != role:
                self._act("flip", role, one.id)
            self._raised(role, "undrain", one.id)
        return len(draining[:most])

    def _flip(self, role: WorkRole, most: int) -> int:
        other = OTHER[role]
        cooled = self._mesh.at - self.memory.raised_at[other] >= self._knobs.cool_s
        spare = self._have[other] - self._mesh.starting.get(other, 0) - self._calm(other, self._knobs.flip_after_s)
        count = max(0, min(most, spare)) if cooled else 0
        for one in self._left[other][:count]:
            self._raised(role, "flip", one.id)
            self._have[other] -= 1
            self.memory = replace(self.memory, lowered_at={**self.memory.lowered_at, other: self._mesh.at})
        del self._left[other][:count]
        return count

    def _add(self, role: WorkRole, count: int) -> None:
        for _ in range(count if self._mesh.can_add else 0):
            self._raised(role, "add", "")

    def _act(self, kind: ActionKind, role: WorkRole, worker: str) -> None:
        want = self._want[role]
        reason = f"{want} {role} workers are needed and {self._mesh.count(role)} are there: {self._why[role]}"
        self.actions.append(ScaleAction(kind=kind, role=role, worker=worker, reason=reason))

    def _raised(self, role: WorkRole, kind: ActionKind, worker: str) -> None:
        self._act(kind, role, worker)
        self._have[role] += 1
        self.memory = replace(self.memory, raised_at={**self.memory.raised_at, role: self._mesh.at})

    def _calm(self, role: WorkRole, seconds: float) -> int:
        """The most that a role has wanted for so long, and at least what runs there needs."""
        wants = [one.count for one in self.memory.wants[role] if self._mesh.at - one.at < seconds]
        return max(*wants, self._floor(role), self._knobs.least[role], 1)

    def _floor(self, role: WorkRole) -> int:
        if role == "prefill":
            return 1
        return ceil(max(self._mesh.sequences / self._mesh.pace.max_running, self._mesh.kv_used) - 1e-9)

    def _may_lower(self, role: WorkRole) -> bool:
        """Long enough since it got one; and it has been watched for long enough."""
        begun, now, knobs = self.memory.wants[role][0].at, self._mesh.at, self._knobs
        watched = now - begun >= knobs.down_after_s - 1.5 * knobs.every_s
        return watched and now - self.memory.raised_at[role] >= knobs.cool_s

    def _down_s(self, role: WorkRole) -> float:
        """For how long fewer have to be enough. Of a load whose period is known the need says what comes next."""
        history = self.memory.prompts if role == "prefill" else self.memory.answers
        return min(self._knobs.flip_after_s if period_of(history) else inf, self._knobs.down_after_s)

    def _drain(self, role: WorkRole, down_s: float) -> bool:
        """One of a role, or of the other one if only those can be removed: then one of this role takes its place."""
        other = OTHER[role]
        own = next((one for one in self._left[role] if one.removable), None)
        theirs = next((one for one in self._left[other] if one.removable), None)
        reason = (
            f"{self._want[role]} {role} workers have been enough for {self._knobs.down_after_s:g} s: {self._why[role]}"
        )
        if own is not None:
            self._left[role].remove(own)
            self._leave(own, reason)
        elif theirs is not None and self._left[role]:
            stands_in = self._left[role].pop(0)
            self._left[other].remove(theirs)
            self.actions.append(ScaleAction(kind="flip", role=other, worker=stands_in.id, reason=reason))
            self._leave(theirs, reason)
        else:
            return False
        self._have[role] -= 1
        self.memory = replace(self.memory, lowered_at={**self.memory.lowered_at, role: self._mesh.at})
        return True

    def _leave(self, worker: WorkerSeen, reason: str) -> None:
        self.actions.append(ScaleAction(kind="drain", role=worker.role, worker=worker.id, reason=reason))
        self.memory = replace(self.memory, leaving={**self.memory.leaving, worker.id: self._mesh.at})
