"""The planner before modelled workers: nothing is lost while they come and go, and waves that come again cost less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.bench.scale import MESH, WORKLOADS, Scaled, ScaleWorkload, knobs, planned, scaled, static
from penstock.cli.scale.state import MeshSeen, ScaleAction
from penstock.simulator.capacity import Slo
from penstock.simulator.controllers import PlannerController, UtilisationController
from penstock.simulator.scaling import ScaledSimulation, ScalingSetup
from penstock.simulator.waves import WavePhase, wave
from penstock.traces.reading import RecordedAsk, Trace

LITTLE = WavePhase(seconds=300, per_s=0.25, prompt=24_000, answer=300)
SLO = Slo(ttft_s=24.0, itl_s=0.06)


def work(periods: int, most: float) -> ScaleWorkload:
    return ScaleWorkload("square", wave("square", [LITTLE, replace(LITTLE, per_s=most)], periods), SLO)


def apart(prefill: int, decode: int, load: ScaleWorkload) -> Scaled:
    return static(load, replace(MESH, prefill=prefill, decode=decode))


@pytest.fixture(scope="module")
def run() -> ScaledSimulation:
    """One period."""
    load = work(1, 1.5)
    setup = ScalingSetup(slo=SLO, start_s=20.0)
    simulation = ScaledSimulation(replace(MESH, prefill=1, decode=1), load.trace, setup, PlannerController(knobs(load)))
    result = simulation.run()
    assert len(result.requests) == len(load.trace.asks)
    assert not any(one.refused for one in result.requests)
    return simulation


def test_workers_come_and_go_and_no_request_is_lost(run: ScaledSimulation) -> None:
    kinds = [action.kind for _, action in run.actions]
    assert kinds.count("add") > 3
    assert 0 < kinds.count("remove") <= kinds.count("drain")
    assert run.planner.ledger.empty


def test_workers_count_from_their_order_until_they_are_gone(run: ScaledSimulation) -> None:
    def actions(kind: str) -> list[tuple[float, ScaleAction]]:
        return [(at, action) for at, action in run.actions if action.kind == kind]

    until = 600.0
    came = sum(until - at for at, _ in actions("add") if at < until)
    went = sum(until - at for at, _ in actions("remove") if at < until)
    assert run.worker_s(0.0, until) == pytest.approx(2 * until + came - went)


def test_a_worker_that_was_ordered_gets_work_when_it_is_ready(run: ScaledSimulation) -> None:
    at = next(at for at, action in run.actions if action.kind == "add")
    joined = [seat.joined_at for name, seat in run._seats.items() if name.startswith("added-")]
    assert len(joined) == sum(action.kind == "add" for _, action in run.actions)
    assert run._stays["added-2"].ordered_at == at


def test_a_prefill_worker_has_nothing_to_do_while_its_answer_is_generated() -> None:
    """So it can be removed when it is drained, as a real one."""
    seen = []

    def look(mesh: MeshSeen) -> list[ScaleAction]:
        seen.append({one.role: one.busy for one in mesh.workers})
        return []

    trace = Trace("one", 512, tuple(RecordedAsk(at, 24_000, 3000, (), "") for at in (0.0, 60.0)))
    ScaledSimulation(replace(MESH, prefill=1, decode=1), trace, ScalingSetup(slo=SLO), look).run()
    assert {"prefill": 0, "decode": 1} in seen
    assert seen[-1] == {"prefill": 0, "decode": 0}


def test_an_autoscaler_by_utilisation_scales_too() -> None:
    """It is a fair reference: it serves everything, and does not stay at its bounds."""
    found = scaled(work(1, 1.5), UtilisationController(SLO.itl_s, 32))
    assert found.met > 0.5
    assert 2 < found.workers < 32


def test_a_wave_that_was_seen_is_served_as_well_with_a_fifth_less_worker_time() -> None:
    """Beside 11 prefill and 3 decode workers, the best split that `penstock bench scale --workload square` finds:
    the third period, after two of which nothing could be foreseen."""
    load = replace(WORKLOADS["square"](3), since=1200.0)
    best, own = apart(11, 3, load), planned(load)
    assert own.met >= best.met > 0.95
    assert own.workers <= 0.8 * best.workers
    assert own.met_before < own.met, "a first rise is not foreseen"
