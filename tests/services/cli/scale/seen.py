"""Meshes as the planner sees them, for its tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.cli.scale.decision import decide
from penstock.cli.scale.needs import SloTargets, WorkerPace
from penstock.cli.scale.state import MeshSeen, ScaleAction, ScaleKnobs, ScaleMemory, WorkerSeen, WorkRole

TARGETS = SloTargets(ttft_s=2.0, itl_s=0.06, share=0.9)
PACE = WorkerPace(prefill_rate=5000.0, step_s=0.02, sequence_s=0.001, max_running=64)
KNOBS = ScaleKnobs(targets=TARGETS, least={"prefill": 1, "decode": 1}, most={"prefill": 6, "decode": 6})


def workers(prefill: int, decode: int, **other: Any) -> list[WorkerSeen]:
    roles: list[WorkRole] = ["prefill"] * prefill + ["decode"] * decode
    return [WorkerSeen(id=f"w{number}", role=role, ready=True, **other) for number, role in enumerate(roles)]


class Fleet:
    """Workers over time, one look every `KNOBS.every_s`: what is decided is done, and a start takes its time."""

    def __init__(self, prefill: int, decode: int, knobs: ScaleKnobs = KNOBS) -> None:
        self.knobs = knobs
        self.now = 1000.0
        self.workers = {one.id: one for one in workers(prefill, decode)}
        self.starting: list[tuple[float, WorkRole]] = []
        self.memory = ScaleMemory()
        self.actions: list[tuple[float, ScaleAction]] = []
        self.want: dict[WorkRole, int] = {}
        self._number = 0

    def count(self, role: WorkRole) -> int:
        """Those that get work, and those that start."""
        ready = sum(one.role == role and one.ready for one in self.workers.values())
        return ready + sum(one == role for _, one in self.starting)

    def seen(self, **load: Any) -> MeshSeen:
        figures: dict[str, Any] = {
            "requests_per_s": 2.0,
            "prompt_tokens_per_s": 0.0,
            "answer_tokens": 0.0,
            "backlog_tokens": 0.0,
            "sequences": 0.0,
            "kv_used": 0.0,
        }
        roles: list[WorkRole] = [role for _, role in self.starting]
        return MeshSeen(
            at=self.now,
            pace=PACE,
            workers=list(self.workers.values()),
            starting={role: roles.count(role) for role in roles},
            **figures | load,
        )

    def look(self, **load: Any) -> list[ScaleAction]:
        """One look at that load, and what comes of it."""
        for order in [order for order in self.starting if order[0] <= self.now]:
            self.starting.remove(order)
            self._number += 1
            name = f"added-{self._number}"
            self.workers[name] = WorkerSeen(id=name, role=order[1], ready=True)
        decision, self.memory = decide(self.seen(**load), self.memory, self.knobs)
        self.want = dict(decision.want)
        for action in decision.actions:
            self.actions.append((self.now, action))
            self._do(action)
        self.now += self.knobs.every_s
        return list(decision.actions)

    def kinds(self) -> list[str]:
        """Of all that was done."""
        return [action.kind for _, action in self.actions]

    def _do(self, action: ScaleAction) -> None:
        match action.kind:
            case "add":
                self.starting.append((self.now + self.knobs.start_s, action.role))
            case "flip":
                assert self.workers[action.worker].role != action.role
                self.workers[action.worker] = replace(self.workers[action.worker], role=action.role)
            case "drain":
                self.workers[action.worker] = replace(self.workers[action.worker], ready=False, draining=True)
            case "undrain":
                self.workers[action.worker] = replace(self.workers[action.worker], ready=True, draining=False)
            case "remove":
                assert self.workers[action.worker].draining and not self.workers[action.worker].busy
                del self.workers[action.worker]
