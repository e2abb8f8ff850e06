"""The planner of `penstock scale` beside meshes that stay as they are, and beside an autoscaler by utilisation.

Everything is simulated, with the router's and the planner's own code: a made-up time, so the figures are the same on
any machine. For each workload the fewest workers of fixed roles are searched at which enough requests meet their
targets, and of these the best split; then the planner serves the same requests, beginning with as few as it may have.
Its workers count from their order on, so the time in which they start, and in which they drain, is worker time. Of
the waves two periods come before those that are measured: what it did in these is told apart.

Limits stand beside the goals: the worker time that the work itself takes, and, of what is measured from its beginning,
the requests within their targets if as many workers as there may be are ordered at the first look.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from penstock.bench.harness import BenchReport, Figure, figure, missing
from penstock.cli.scale.needs import SloTargets, WorkerPace
from penstock.cli.scale.state import ROLES, ScaleAction, ScaleKnobs
from penstock.errors import PenstockError
from penstock.router.plans import Planned
from penstock.router.workers import StepCost
from penstock.simulator.capacity import CapacitySearch, Slo, Tried
from penstock.simulator.controllers import PlannerController, UtilisationController
from penstock.simulator.scaling import Controller, ScaledSimulation, ScalingSetup
from penstock.simulator.simulation import Served, SimulatedMesh, Simulation
from penstock.simulator.waves import WavePhase, wave
from penstock.simulator.workers import WorkerModel
from penstock.traces.reading import RecordedAsk, Trace, load, load_lengths
from penstock.traces.shaping import new_tokens

_TRACES = Path(__file__).parents[3] / "loadtest" / "traces"
_GOOD = 0.95
"""Of all requests are to meet their targets: in the mesh that stays, and by the planner."""
_LESS = 0.8
"""Goal: so much of the worker time of the mesh that stays."""
_MOST = 32
"""Workers of a role."""
_START_S = 20.0
MODEL = WorkerModel(prefill_rate=5000.0, step=StepCost(0.02, 0.0008, 2e-8))
MESH = SimulatedMesh(model=MODEL, per_host=1 << 20, store_blocks=50_000)
"""One store, which stays: what scales is workers."""
PACE = WorkerPace(
    prefill_rate=MODEL.prefill_rate,
    step_s=MODEL.step.base_s,
    sequence_s=MODEL.step.sequence_s,
    max_running=MODEL.max_running,
)
_SLO = Slo(ttft_s=12.0, itl_s=0.06)
_PATIENT = Slo(ttft_s=20.0, itl_s=0.1)
"""For prompts of 100,000 tokens, which a worker computes for 20 s."""


@dataclass(frozen=True, slots=True)
class ScaleWorkload:
    """Requests, and what they are to have."""

    name: str
    trace: Trace
    slo: Slo = _SLO
    since: float = 0.0
    """Seconds after which it is measured: the planner has seen as much of it before."""

    @property
    def seconds(self) -> float:
        """For which it is measured."""
        return self.trace.asks[-1].at - self.since

    def share(self, requests: Iterable[Served], *, before: bool = False) -> float:
        """Of those that count, or of those before them, the part that met its targets."""
        met = [self.slo.met(one) for one in requests if (one.at < self.since) is before]
        return sum(met) / max(1, len(met))


@dataclass(frozen=True, slots=True)
class Scaled:
    """How a workload was served."""

    met: float
    """Share of the requests that met their targets."""
    workers: float
    """In the mean."""
    met_before: float = 0.0
    """Share of those that came before it is measured; 0: there were none."""


def square(periods: int) -> Trace:
    """Five minutes of little, five minutes of eight times as much."""
    little = WavePhase(seconds=300, per_s=0.5, prompt=12_000, answer=300)
    return wave("square", [little, replace(little, per_s=4.0)], periods)


def seesaw(periods: int) -> Trace:
    """Five minutes of long prompts with short answers, five minutes of the opposite."""
    reading = WavePhase(seconds=300, per_s=2, prompt=12_000, answer=100)
    writing = WavePhase(seconds=300, per_s=2, prompt=1200, answer=1600)
    return wave("seesaw", [reading, writing], periods)


def _recorded(name: str) -> Trace:
    return load(_TRACES / f"{name}.jsonl.gz")


def _since(periods: int) -> float:
    """Two periods, of which nothing could be foreseen."""
    return 1200.0 if periods > 2 else 0.0


WORKLOADS: Mapping[str, Callable[[int], ScaleWorkload]] = {
    "square": lambda periods: ScaleWorkload("square", square(periods), since=_since(periods)),
    "seesaw": lambda periods: ScaleWorkload("seesaw", seesaw(periods), since=_since(periods)),
    "conversation": lambda periods: ScaleWorkload("conversation", _recorded("conversation"), _PATIENT),
}
"""By name; the number of periods is that of the made-up ones."""


def workloads(quick: bool, names: Sequence[str], traces: Sequence[Path]) -> Iterator[ScaleWorkload]:
    """Those that are named, else all; with `traces` these instead. Raises TraceError."""
    if traces:
        for path in traces:
            read = load_lengths(path) if ".csv" in path.name else load(path)
            yield ScaleWorkload(read.name, read)
        return
    for name in names or WORKLOADS:
        yield WORKLOADS[name](1 if quick else 5)


def best_static(work: ScaleWorkload) -> Tried | None:
    """The fewest workers of fixed roles at which enough requests meet their targets; None: more than are allowed."""
    asks, seconds = work.trace.asks, work.trace.asks[-1].at
    rate, pace = PACE.prefill_rate, PACE.answer_rate(work.slo.itl_s)
    busy = (sum(new_tokens(work.trace)) / rate, sum(ask.output for ask in asks) / pace)
    prefill, decode = (max(1, ceil(each / seconds)) for each in busy)
    return CapacitySearch(MESH, _GOOD, lambda mesh: static(work, mesh).met, 2 * _MOST, least=(prefill, decode)).run()


def static(work: ScaleWorkload, mesh: SimulatedMesh) -> Scaled:
    """Served by workers that stay as they are."""
    return Scaled(StaticSimulation(mesh, work).met(), mesh.prefill + mesh.decode)


class _Hopeless(Exception):
    """Too many requests have missed their targets for the others to make up for it."""


class StaticSimulation(Simulation):
    """Ends when it is certain that a mesh is not good enough: an overloaded one takes long to simulate."""

    def __init__(self, mesh: SimulatedMesh, work: ScaleWorkload) -> None:
        super().__init__(mesh, work.trace)
        self._work = work
        self._count = len(work.trace.asks)
        self._good = self._bad = 0

    def met(self) -> float:
        """The share of the requests that count which met their targets; of a mesh that is not good enough for all
        requests, the share of these that had done so when that was certain."""
        with suppress(_Hopeless):
            return self._work.share(self.run().requests)
        return self._good / self._count

    def place(self, ask: RecordedAsk, served: Served, planned: Planned | PenstockError) -> None:
        super().place(ask, served, planned)
        if served.refused:
            self._judge(served)

    def _ended(self, ask: RecordedAsk, served: Served, planned: Planned) -> None:
        super()._ended(ask, served, planned)
        self._judge(served)

    def _judge(self, served: Served) -> None:
        good = self._work.slo.met(served)
        self._good += good
        self._bad += not good
        if self._bad > (1 - _GOOD) * self._count:
            raise _Hopeless


def scaled(work: ScaleWorkload, controller: Controller, start_s: float = _START_S) -> Scaled:
    """Served by one prefill and one decode worker at first, and whoever the controller has beside them."""
    setup = ScalingSetup(slo=work.slo, start_s=start_s)
    simulation = ScaledSimulation(replace(MESH, prefill=1, decode=1), work.trace, setup, controller)
    requests = simulation.run().requests
    workers = simulation.worker_s(work.since, work.since + work.seconds) / work.seconds
    return Scaled(work.share(requests), workers, work.share(requests, before=True))


def knobs(work: ScaleWorkload, start_s: float = _START_S) -> ScaleKnobs:
    """The planner's defaults, and the workload's targets."""
    targets = SloTargets(ttft_s=work.slo.ttft_s, itl_s=work.slo.itl_s, share=_GOOD)
    return ScaleKnobs(
        targets=targets,
        least={"prefill": 1, "decode": 1},
        most={"prefill": _MOST, "decode": _MOST},
        start_s=start_s,
        idle_s=0.0,  # the simulated workers know who is on the way
    )


def busy_workers(work: ScaleWorkload) -> float:
    """Workers, in the mean, that the work alone keeps busy, at least one of each role: each prompt is computed once,
    and answers run in full batches all the time. No planner does with less but for what is left at the end: its workers
    also start, drain, and wait for requests."""
    step, prefill_s, decode_s = MODEL.step, 0.0, 0.0
    token_s = step.base_s / MODEL.max_running + step.sequence_s
    for ask, tokens in zip(work.trace.asks, new_tokens(work.trace), strict=True):
        if ask.at >= work.since:
            prefill_s += tokens / MODEL.prefill_rate
            decode_s += ask.output * (token_s + step.token_s * (ask.tokens + ask.output / 2))
    return sum(max(1.0, seconds / work.seconds) for seconds in (prefill_s, decode_s))


def at_once(work: ScaleWorkload) -> Scaled:
    """Served by as many workers as there may be, all ordered at the first look: but for chance, no planner that begins
    with as few has more requests within their targets."""
    all_of_them = [ScaleAction(kind="add", role=role, reason="all at once") for role in ROLES for _ in range(_MOST - 1)]
    orders = iter([all_of_them])
    return scaled(work, lambda mesh: next(orders, []))


def planned(work: ScaleWorkload, start_s: float = _START_S) -> Scaled:
    """Served as `penstock scale` would have it."""
    return scaled(work, PlannerController(knobs(work, start_s)), start_s)


def measure(quick: bool, names: Sequence[str] = (), traces: Sequence[Path] = ()) -> BenchReport:
    """All workloads, or those that are named. Raises TraceError."""
    found: list[Figure] = []
    times, met = [], []
    for work in workloads(quick, names, traces):
        best = best_static(work)
        if best is None:
            found.append(missing(f"planner_worker_time_vs_static_{work.name}", "ratio", "no static mesh is enough"))
            continue
        own, other = planned(work), scaled(work, UtilisationController(work.slo.itl_s, _MOST))
        shown = f"{best.mesh.prefill} + {best.mesh.decode} static {best.good:.4f}, planner {own}, utilisation {other}"
        print(f"{work.name}: {shown}", file=sys.stderr, flush=True)
        times.append(own.workers / best.workers)
        met.append(own.met / best.good)
        found += _of_one(work.name, own, best, other)
        found += _limits(work, best)
    against = "the best static split, the median of all workloads"
    if not times:
        return BenchReport("scale", found, simulated=True)
    head = [
        figure("planner_worker_time_vs_static", times, "ratio", against, _LESS, lower_is_better=True),
        figure("planner_slo_attainment", met, "ratio", against, 1.0),
    ]
    return BenchReport("scale", [*head, *found], simulated=True)


def _limits(work: ScaleWorkload, best: Tried) -> list[Figure]:
    """What no planner does better than. Waves are measured when it has had time for all workers it may want."""
    busy, against = busy_workers(work), "for scale"
    return [
        figure(f"busy_workers_{work.name}", [busy], "workers", against),
        figure(f"busy_workers_vs_static_{work.name}", [busy / best.workers], "ratio", against),
        *([] if work.since else [figure(f"at_once_met_{work.name}", [at_once(work).met], "ratio", against)]),
    ]


def _of_one(name: str, own: Scaled, best: Tried, other: Scaled) -> list[Figure]:
    mesh, against = best.mesh, f"{best.mesh.prefill} prefill and {best.mesh.decode} decode workers"
    ratios = (
        ("planner_worker_time_vs_static", own.workers / best.workers, _LESS, True),
        ("planner_slo_attainment", own.met / best.good, 1.0, False),
    )
    shown: Sequence[tuple[str, float, str]] = (
        ("static_workers", mesh.prefill + mesh.decode, "workers"),
        ("static_met", best.good, "ratio"),
        ("planner_workers", own.workers, "workers"),
        ("planner_met", own.met, "ratio"),
        ("utilisation_workers", other.workers, "workers"),
        ("utilisation_met", other.met, "ratio"),
    )
    return [
        *(
            figure(f"{id}_{name}", [value], "ratio", against, goal, lower_is_better=lower)
            for id, value, goal, lower in ratios
        ),
        *(figure(f"{id}_{name}", [value], unit, "for scale") for id, value, unit in shown),
        *([figure(f"planner_met_unseen_{name}", [own.met_before], "ratio", "for scale")] if own.met_before else []),
    ]
