"""`penstock bench router` measures decisions of a router that is in the middle of its work, and leaves it as it was."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from penstock.bench.harness import BenchReport
from penstock.bench.measured.document import section
from penstock.bench.router import measure
from penstock.bench.router.crowd import BLOCK, TURN_TOKENS, Crowd, CrowdSetup
from penstock.bench.router.validation import Calibration, rate_figures
from penstock.router.workers import StepCost
from penstock.simulator.rates import rates, read_rates


@pytest.mark.parametrize("disaggregated", [False, True])
def test_a_session_finds_what_its_last_turn_left(disaggregated: bool) -> None:
    crowd = Crowd(CrowdSetup(12, disaggregated, blocks=2000))
    planner = crowd.planner
    before, live = len(planner.index), len(planner.ledger)
    first, second = islice(crowd.session("s", 5000), 2)
    assert (len(first.block_keys), len(second.block_keys)) == (5000 // BLOCK, TURN_TOKENS // BLOCK)
    crowd.serve(first)
    whole = planner.recall(second)
    assert whole is not None
    planned = planner.plan(whole)
    assert planned.cached_tokens == 5000 // BLOCK * BLOCK
    assert (planned.prefill is not None) is disaggregated
    members = planner.ledger.members(planned.number)
    crowd.end(planned.number)
    crowd.store(second, members)
    assert len(planner.ledger) == live
    assert len(planner.index) == before + (5000 + TURN_TOKENS) // BLOCK - 60, "but for the common beginning"


async def test_all_sizes_are_measured() -> None:
    report = await measure.measure(quick=True)
    found = {figure.id: figure for figure in report.figures}
    assert {"warm_decision_us_100k", "decisions_per_s_1000_workers", "look_at_all_vs_few_1000"} <= found.keys()
    assert all(figure.value for figure in report.figures if figure.unit == "us")
    ratio = found["look_at_all_vs_few_1000"].value
    assert ratio is not None and ratio > 1
    assert found["hit_vs_infinite_min"].value is not None
    text = section(report.json())
    assert "n/a" not in text
    assert text.count("| coding_agents, 4 |") == 2, "a row for each policy that was run"
    assert "| coding_agents | all |" in text, "with and without names and stores"
    assert found["hint|coding_agents|neither|all|hit"].value is not None


def test_the_rates_that_are_kept_are_those_of_the_model(tmp_path: Path) -> None:
    """The median of the rounds, in a report that the document is made of too."""
    rounds = [
        Calibration(
            overhead_s=0.004,
            prefill_rate=1_234.5 * factor,
            prefill_context_s=6.7e-8 * factor,
            step=StepCost(0.0123, 0.0045, 6.7e-7).times(factor),
            fetch_rate=8.9e8 * factor,
        )
        for factor in (1.0, 0.5, 2.0)
    ]
    report = BenchReport("router", rate_figures([one.model for one in rounds])).json()
    kept = tmp_path / "rates.json"
    kept.write_text(report, encoding="utf-8")
    assert rates(read_rates(kept)) == rates(rounds[0].model)
    assert section(report)
