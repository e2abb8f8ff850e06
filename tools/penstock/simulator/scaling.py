"""A simulated mesh whose workers come, go and change sides as a controller says, with the seconds that a start takes.

The controller sees what `penstock scale` sees of a real mesh, and the actions are those that it takes there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.cli.scale.metering import LoadMeter, MeshCounts
from penstock.cli.scale.needs import WorkerPace
from penstock.cli.scale.state import JUDGED_S, MeshSeen, ScaleAction, WorkerSeen, WorkRole
from penstock.errors import PenstockError
from penstock.router.plans import Planned
from penstock.router.workers import Role
from penstock.simulator.capacity import Slo
from penstock.simulator.simulation import Served, SimulatedMesh, Simulation
from penstock.traces.reading import RecordedAsk, Trace

Controller = Callable[[MeshSeen], Sequence[ScaleAction]]
"""What to do now."""
_ROLE: dict[WorkRole, Role] = {"prefill": Role.PREFILL, "decode": Role.DECODE}
_WORK: dict[Role, WorkRole] = {role: work for work, role in _ROLE.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSetup:
    """How workers come."""

    every_s: float = 5.0
    """Between two looks of the controller."""
    start_s: float = 30.0
    """From the order of a worker until it is ready."""
    slo: Slo


@dataclass(slots=True)
class _Stay:
    """A worker, from its order until it has gone."""

    ordered_at: float
    gone_at: float | None = None


class ScaledSimulation(Simulation):
    """One run. All workers share one store, which stays."""

    def __init__(self, mesh: SimulatedMesh, trace: Trace, setup: ScalingSetup, controller: Controller) -> None:
        self._starting: Counter[WorkRole] = Counter()
        self._promised: Counter[str] = Counter()
        """Requests that are planned for a worker and have not ended there: where only the prompt is computed, they end
        with it, as with real workers."""
        self._placed_tokens = self._answer_tokens = 0.0
        self._arrived = self._begun = 0
        self._judged: deque[tuple[float, bool, bool]] = deque()
        """When requests ended, and which targets they met."""
        self.actions: list[tuple[float, ScaleAction]] = []
        """All that was done."""
        super().__init__(mesh, trace)
        self._setup, self._controller = setup, controller
        self._meter = LoadMeter()
        self._stays = {name: _Stay(0.0) for name in self._workers}
        self._at(0.0, self._look)

    def worker_s(self, begin: float, end: float) -> float:
        """Seconds of all workers between two times, those in which they start and drain among them."""
        stays = [(stay.ordered_at, end if stay.gone_at is None else stay.gone_at) for stay in self._stays.values()]
        return sum(max(0.0, min(end, gone) - max(begin, came)) for came, gone in stays)

    # -- what happens to requests

    def _arrive(self, ask: RecordedAsk, served: Served, decisions: list[float]) -> None:
        self._arrived += 1
        super()._arrive(ask, served, decisions)

    def place(self, ask: RecordedAsk, served: Served, planned: Planned | PenstockError) -> None:
        if isinstance(planned, PenstockError):
            self._judge(served, refused=True)
        else:
            self._placed_tokens += planned.uncached_tokens
            for worker in {(planned.prefill or planned.decode).id, planned.decode.id}:
                self._promised[worker] += 1
        super().place(ask, served, planned)

    def _prefilled(self, ask: RecordedAsk, served: Served, planned: Planned) -> None:
        if planned.prefill is not None and planned.prefill.id != planned.decode.id:
            self._promised[planned.prefill.id] -= 1
        self._begun += 1
        super()._prefilled(ask, served, planned)

    def _ended(self, ask: RecordedAsk, served: Served, planned: Planned) -> None:
        super()._ended(ask, served, planned)
        self._promised[planned.decode.id] -= 1
        self._judge(served)

    def _judge(self, served: Served, *, refused: bool = False) -> None:
        slo = self._setup.slo
        self._judged.append((self._now, not refused and served.ttft_s <= slo.ttft_s, served.itl_s <= slo.itl_s))

    # -- looks

    def _look(self) -> None:
        seen = self._meter.look(self._counts())
        for action in () if seen is None else self._controller(seen):
            self.actions.append((self._now, action))
            self._do(action)
        if self._now < self._trace.asks[-1].at or not self.planner.ledger.empty or len(self.line):
            self._at(self._now + self._setup.every_s, self._look)

    def _counts(self) -> MeshCounts:
        here = {name: seat for name, seat in self._seats.items() if self._stays[name].gone_at is None}
        decoding = [self._workers[name] for name, seat in here.items() if seat.member.role is Role.DECODE]
        self._answer_tokens += self._setup.every_s * sum(len(one.streams) / one.step_s for one in decoding)
        queued = sum(self._workers[name].queued for name in here)
        model, sequences = self._mesh.model, sum(len(one.streams) + len(one.waiting) for one in decoding)
        context = sum(one.held for one in decoding)
        while self._judged and self._now - self._judged[0][0] > JUDGED_S:
            self._judged.popleft()
        judged = max(1, len(self._judged))
        return MeshCounts(
            at=self._now,
            arrived=self._arrived,
            begun=self._begun,
            computed_tokens=self._placed_tokens - queued,
            answer_tokens=self._answer_tokens,
            accepted_tokens=0.0,
            queued_tokens=queued,
            held=len(self.line),
            sequences=sequences,
            kv_used=context / model.kv_tokens,
            pace=WorkerPace(
                prefill_rate=model.prefill_rate,
                step_s=model.step.base_s,
                sequence_s=model.step.sequence_s + model.step.token_s * context / max(1, sequences),
                max_running=model.max_running,
            ),
            workers=[
                WorkerSeen(
                    id=name,
                    role=_WORK[seat.member.role or Role.DECODE],
                    ready=not seat.draining,
                    draining=seat.draining,
                    busy=self._promised[name],
                )
                for name, seat in here.items()
            ],
            starting=dict(self._starting),
            judged=len(self._judged),
            ttft_met=sum(ttft for _, ttft, _ in self._judged) / judged,
            itl_met=sum(itl for _, _, itl in self._judged) / judged,
        )

    # -- actions

    def _do(self, action: ScaleAction) -> None:
        match action.kind:
            case "add":
                self._starting[action.role] += 1
                name = f"added-{len(self._stays)}"
                self._stays[name] = _Stay(self._now)
                self._at(self._now + self._setup.start_s, lambda: self._ready(name, action.role))
            case "flip":
                self.planner.registry.assign(self._seats[action.worker], _ROLE[action.role])
            case "drain" | "undrain":
                self._seats[action.worker].drain(action.kind == "drain")
            case "remove":
                self._stays[action.worker].gone_at = self._now
                self.planner.registry.leave(self._seats[action.worker])
                self.planner.index.drop(action.worker)
        self._stir()

    def _ready(self, name: str, role: WorkRole) -> None:
        self._starting[role] -= 1
        self._join(name, _ROLE[role], "host-0")
        self._stir()
