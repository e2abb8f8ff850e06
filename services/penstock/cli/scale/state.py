"""What the planner sees, remembers and does: plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from penstock.cli.scale.answers import AnswersSeen
from penstock.cli.scale.forecast import LoadHistory
from penstock.cli.scale.needs import SloTargets, WorkerPace

WorkRole = Literal["prefill", "decode"]
ROLES: tuple[WorkRole, WorkRole] = ("prefill", "decode")
OTHER: Mapping[WorkRole, WorkRole] = {"prefill": "decode", "decode": "prefill"}
ActionKind = Literal["undrain", "flip", "add", "drain", "remove"]

JUDGED_S = 60.0
"""Requests that ended within so many seconds say whether targets are met."""


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
class MeshNow:
    """What a mesh is at one look, whatever it was before."""

    at: float
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSeen(MeshNow):
    """One look at a mesh. Rates are those since the look before."""

    requests_per_s: float
    prompt_tokens_per_s: float
    """To be computed, those that wait among them."""
    computed_per_s: float = 0.0
    """Tokens of prompts that were computed."""
    answer_tokens: float
    """Of one answer, in the mean of late ones."""
    generated_per_s: float = 0.0
    """Tokens of answers."""
    ended_per_s: float = 0.0
    """Answers. One look may say too few, or less than none: some are between prefill and decode."""
    backlog_tokens: float
    """Of prompts, to be computed before anything new."""

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
class ScaleWant:
    """Workers of a role that were needed at one time."""

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
    period: int = 0
    """Of the load, in looks; 0: it has none."""
    late_computed: tuple[float, ...] = ()
    """Tokens of prompts per second of the last looks, as long as all of these had more to compute than they could."""
    late_answers: tuple[AnswersSeen, ...] = ()
    """Of the last looks."""
    wants: Mapping[WorkRole, tuple[ScaleWant, ...]] = field(default_factory=dict)
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
