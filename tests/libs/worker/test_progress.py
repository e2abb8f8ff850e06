"""How long a worker may be without progress."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.pages import PagePool
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.situation import StepLimits
from penstock.engine.stats import Counters, EngineStats, collect
from penstock.runtime.turns.baton import TurnCounters
from penstock.worker.progress import IdleWatch, overdue

MOST_S = 30.0


@pytest.fixture
def rests() -> EngineStats:
    """An engine that has nothing to do."""
    scheduler = Scheduler(StepLimits(64, 4, 16), PagePool(8))
    return collect(scheduler.stats(), Counters(resting=True), 0, None, turns=TurnCounters(), lookup_defects=0)


def test_an_engine_without_work_may_rest(rests: EngineStats) -> None:
    watch = IdleWatch()
    assert not any(overdue(watch.seen(rests, now), MOST_S) for now in range(1000))


@pytest.mark.parametrize("change", [{"running": 1}, {"waiting": 1}, {"resting": False}], ids=str)
def test_one_that_begins_no_step_is_overdue_after_the_limit(rests: EngineStats, change: dict[str, Any]) -> None:
    """Sequences wait, or its loop does not come back to its rest."""
    watch, waits = IdleWatch(), replace(rests, **change)
    watch.seen(rests, 100.0)
    assert [overdue(watch.seen(waits, now), MOST_S) for now in (101.0, 129.0, 130.5)] == [False, False, True]
    assert not overdue(watch.seen(replace(waits, steps=1), 131.0), MOST_S)


def test_one_that_computes_is_judged_by_its_step(rests: EngineStats) -> None:
    watch, waits = IdleWatch(), replace(rests, running=1, resting=False)
    watch.seen(waits, 100.0)
    computes = replace(waits, in_step_s=1.0, expected_s=1.0)
    assert watch.seen(computes, 200.0) == computes
    assert watch.seen(waits, 201.0).in_step_s == 1.0
