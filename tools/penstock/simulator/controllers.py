"""Who decides about the workers of a simulated mesh: the planner's own code, and an autoscaler to compare it with."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from penstock.cli.scale.decision import decide
from penstock.cli.scale.state import ROLES, MeshSeen, ScaleAction, ScaleKnobs, ScaleMemory, WorkRole

_OVER_S = 15.0
"""Seconds over which utilisation is averaged, as often as Kubernetes looks."""
_LOOKS = 3


class PlannerController:
    """What `penstock scale` would do."""

    def __init__(self, knobs: ScaleKnobs) -> None:
        self._knobs = knobs
        self._memory = ScaleMemory()

    def __call__(self, mesh: MeshSeen) -> Sequence[ScaleAction]:
        """Its actions."""
        decision, self._memory = decide(mesh, self._memory, self._knobs)
        return decision.actions


@dataclass(slots=True)
class UtilisationController:
    """A horizontal autoscaler for each role, by the rule that Kubernetes documents: so many workers that their
    utilisation would be `target`, unless it is within a tenth of that; the most of what was wanted within the last
    `calm_s` seconds, before there are fewer.

    Utilisation is the share of time in which prefill workers compute, and the share of places within the ITL target
    that decode workers have taken: the time in which these compute something would be all of it always.
    """

    itl_s: float
    most: int
    target: float = 0.7
    calm_s: float = 300.0
    _wanted: dict[WorkRole, deque[tuple[float, int]]] = field(default_factory=lambda: {role: deque() for role in ROLES})
    _leaving: set[str] = field(default_factory=set)
    _busy: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_LOOKS))

    def __call__(self, mesh: MeshSeen) -> Sequence[ScaleAction]:
        """Its actions."""
        actions = [
            ScaleAction(kind="remove", role=one.role, worker=one.id, reason="it is drained")
            for one in mesh.workers
            if one.id in self._leaving and not one.busy
        ]
        for role, used in self._used(mesh).items():
            have, count = mesh.having(role), mesh.count(role)
            off = used / max(1, len(have)) / self.target
            want = min(self.most, max(1, ceil(used / self.target))) if abs(off - 1) > 0.1 else count
            wanted = self._wanted[role]
            wanted.append((mesh.at, want))
            while mesh.at - wanted[0][0] > self.calm_s:
                wanted.popleft()
            calm = max(count for _, count in wanted)
            actions += [ScaleAction(kind="add", role=role, reason="utilisation")] * max(0, want - count)
            for one in sorted(have, key=lambda one: one.busy)[: max(0, count - calm)]:
                self._leaving.add(one.id)
                actions.append(ScaleAction(kind="drain", role=role, worker=one.id, reason="utilisation"))
        return actions

    def _used(self, mesh: MeshSeen) -> Mapping[WorkRole, float]:
        """Workers that are busy; a worker is not more than that."""
        busy = (mesh.prompt_tokens_per_s + mesh.backlog_tokens / _OVER_S) / mesh.pace.prefill_rate
        taken = mesh.sequences / mesh.pace.places(self.itl_s)
        self._busy.append((min(busy, len(mesh.having("prefill"))), min(taken, len(mesh.having("decode")))))
        prefill, decode = (sum(used) / len(self._busy) for used in zip(*self._busy, strict=True))
        return {"prefill": prefill, "decode": decode}
