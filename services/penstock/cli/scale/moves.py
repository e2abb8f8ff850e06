"""The actions of one decision, in the order of what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import ceil, inf

from penstock.cli.scale.state import (
    OTHER,
    ROLES,
    ActionKind,
    MeshSeen,
    ScaleAction,
    ScaleKnobs,
    ScaleMemory,
    WorkerSeen,
    WorkRole,
)

_LONGEST_GAP = 3.0
"""Between two looks, in times of the usual one, in which nothing was missed; ..."""
_LOOK_S = 5.0
"""... and so long a look itself may take."""


class Moves:
    """The actions of one decision."""

    def __init__(
        self,
        mesh: MeshSeen,
        memory: ScaleMemory,
        knobs: ScaleKnobs,
        want: Mapping[WorkRole, int],
        why: Mapping[WorkRole, str],
    ) -> None:
        """`want`: workers of each role; `why`: the figures behind them."""
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
            down_s = self._down_s()
            spare = self._have[role] - self._calm(role, down_s)
            if self._mesh.starting.get(role, 0) or not self._may_lower(role):
                continue
            for _ in range(spare):
                if not self._drain(role, down_s):
                    break

    def remove(self) -> None:
        """Those on which nothing runs any more. Not while one is started, which an actuator could end in its place."""
        if any(self._mesh.starting.values()):
            return
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
        cooled = self._mesh.at - self.memory.raised_at[other] >= self._knobs.cool_s and self._watched(other)
        spare = self._have[other] - self._mesh.starting.get(other, 0) - self._calm(other, self._knobs.flip_after_s)
        count = max(0, min(most, spare)) if cooled else 0
        for one in self._left[other][:count]:
            self._raised(role, "flip", one.id)
            self._have[other] -= 1
            self.memory = replace(self.memory, lowered_at={**self.memory.lowered_at, other: self._mesh.at})
        del self._left[other][:count]
        return count

    def _watched(self, role: WorkRole) -> bool:
        """Whether the mesh was looked at, without a long gap, for as long as a worker must have been spare before it
        changes its role."""
        now, knobs = self._mesh.at, self._knobs
        since = now - min(knobs.flip_after_s, knobs.down_after_s) + 1.5 * knobs.every_s
        looks = [one.at for one in self.memory.wants[role]]
        first = max((place for place, at in enumerate(looks) if at <= since), default=None)
        if first is None:
            return False
        gaps = [later - earlier for earlier, later in pairwise(looks[first:])]
        return max(gaps, default=0.0) <= _LONGEST_GAP * knobs.every_s + _LOOK_S

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

    def _down_s(self) -> float:
        """For how long fewer have to be enough. Of a load whose period is known the need says what comes next."""
        return min(self._knobs.flip_after_s if self.memory.period else inf, self._knobs.down_after_s)

    def _drain(self, role: WorkRole, down_s: float) -> bool:
        """One of a role, or of the other one if only those can be removed: then one of this role takes its place."""
        other = OTHER[role]
        own = next((one for one in self._left[role] if one.removable), None)
        theirs = next((one for one in self._left[other] if one.removable), None)
        enough = self._calm(role, down_s)
        reason = f"{enough} {role} workers have been enough for {down_s:g} s: {self._why[role]}"
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
