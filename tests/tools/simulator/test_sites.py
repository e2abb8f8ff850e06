"""Several sites: what is known of the way, and that knowing each other helps where one is too small."""

from __future__ import annotations

import json
from math import inf

import pytest

from penstock.simulator.command import app
from penstock.simulator.simulation import SimulatedMesh, Simulation
from penstock.simulator.sites import SitesResult, SitesSimulation, days, way_s
from penstock.traces.reading import Trace

PLACES = ("tokyo", "frankfurt", "virginia")
BLOCK = 512
MESH = SimulatedMesh(both=2)


def run(sessions: int, spill_s: float, seed: int = 1) -> SitesResult:
    asks = days(PLACES, sessions=sessions, day_s=1200.0, block_tokens=BLOCK, seed=seed)
    return SitesSimulation(dict.fromkeys(PLACES, MESH), BLOCK, spill_s=spill_s).run(asks)


def test_ways_are_those_of_the_globe() -> None:
    """From Tokyo to Frankfurt it is 9,360 km."""
    assert way_s("tokyo", "frankfurt") == pytest.approx(2 * 1.4 * 9_360 / 200_000, rel=0.01)
    assert way_s("tokyo", "tokyo") == 0.0
    assert way_s("tokyo", "osaka") < way_s("tokyo", "singapore") < way_s("tokyo", "virginia")


def test_sites_that_know_nobody_are_meshes_by_themselves() -> None:
    asks = days(PLACES, sessions=60, day_s=1200.0, block_tokens=BLOCK)
    together = SitesSimulation(dict.fromkeys(PLACES, MESH), BLOCK, spill_s=inf).run(asks)
    for place in PLACES:
        alone = Simulation(MESH, Trace(place, BLOCK, tuple(asks[place]))).run()
        assert [one.started_s for one in together.requests[place]] == [one.started_s for one in alone.requests]


def test_where_a_site_has_too_much_the_others_help() -> None:
    apart, together = run(150, inf), run(150, 1.0)
    assert together.percentile(0.9) < 0.5 * apart.percentile(0.9)
    assert together.hit > apart.hit - 0.05, "sessions are not torn between sites"
    assert 0 < sum(together.spilled.values()) < 0.25 * len(together.all)


@pytest.mark.parametrize("seed", [1, 2])
def test_where_each_has_enough_nothing_changes(seed) -> None:
    apart, together = run(60, inf, seed), run(60, 1.0, seed)
    assert together.percentile(0.9) < 1.05 * apart.percentile(0.9)
    assert sum(together.spilled.values()) < 0.02 * len(together.all)


def test_the_command(capsys) -> None:
    words = ["sites", "--place", "tokyo", "--place", "osaka", "--sessions", "10", "--day-s", "300", "--json"]
    assert app(words, result_action="return_value") == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["sites"] for row in found["rows"]] == ["apart", "together"]
    assert 0.005 < found["ways_s"]["tokyo-osaka"] < 0.007
    assert app(["sites", "--place", "atlantis"], result_action="return_value") == 2
