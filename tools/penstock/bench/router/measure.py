"""`penstock bench router`: microseconds of a decision, for meshes and prompts of all sizes; policies on recorded
workloads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from penstock.bench.harness import BenchReport, Figure, Measure, figure, interleave
from penstock.bench.router.crowd import Crowd, CrowdSetup
from penstock.bench.router.policies import TRACES, hint_runs, policy_figures, policy_runs
from penstock.bench.router.roles import roles_figures
from penstock.bench.router.validation import validation_figures
from penstock.router.plans import PlanAsk

RouterPart = Literal["decisions", "policies", "hints", "simulator", "roles"]
_SIMULATED: Sequence[RouterPart] = ("policies", "hints")

_WORKERS = (10, 100, 1000)
_TOKENS = {"1k": 1_000, "10k": 10_000, "100k": 100_000}
_SIZES = (8, 64)
"""Prefill workers of the simulated meshes."""
_GOAL_US, _GOAL_PER_S = 100.0, 3_000.0


async def measure(quick: bool, parts: Sequence[RouterPart] = (), traces: Sequence[Path] = ()) -> BenchReport:
    """Runs the bench; without `parts` all of them, without `traces` those of the repository."""
    found: list[Figure] = []
    if not parts or "decisions" in parts:
        found += await _decisions(quick)
    paths = traces or sorted(TRACES.glob("*.jsonl.gz"))[: 1 if quick else None]
    if not parts or "policies" in parts:
        found += policy_figures(policy_runs(paths, (4,) if quick else _SIZES, quick))
    if not parts or "hints" in parts:
        found += hint_runs(paths, quick)
    if "simulator" in parts or not (parts or quick):
        found += await validation_figures(TRACES / "swe_agents.jsonl.gz", quick)
    if "roles" in parts or not (parts or quick):
        found += await roles_figures(quick)
    return BenchReport("router", found, simulated=bool(parts) and set(parts) <= set(_SIMULATED))


async def _decisions(quick: bool) -> list[Figure]:
    rounds, blocks = (3, 100_000) if quick else (9, 1_000_000)
    cases = [(workers, apart) for workers in _WORKERS for apart in (False, True)]
    crowds = {case: Crowd(CrowdSetup(case[0], case[1], blocks)) for case in cases}
    subjects: dict[str, Measure[float]] = {}
    for (workers, apart), crowd in crowds.items():
        for name, tokens in _TOKENS.items():
            prefix = f"{workers}_{name}{'_disaggregated' if apart else ''}"
            subjects[f"cold_{prefix}"] = _Cold(crowd, tokens).measure
            subjects[f"warm_{prefix}"] = _Warm(crowd, tokens).measure
    subjects["all_1000"] = _All(crowds[1000, False]).measure
    subjects["whole_1000_10k"] = _Whole(crowds[1000, False], _TOKENS["10k"]).measure
    samples = await interleave(subjects, rounds)
    return _figures(samples)


def _figures(samples: dict[str, list[float]]) -> list[Figure]:
    us = {name: [seconds * 1e6 for seconds in found] for name, found in samples.items()}
    whole, pairs = us["whole_1000_10k"], list(zip(us["all_1000"], us["warm_1000_10k"], strict=True))
    lead = [
        figure("warm_decision_us_100k", us["warm_100_100k"], "us", "100 workers", _GOAL_US, lower_is_better=True),
        figure("decisions_per_s_1000_workers", [1e6 / one for one in whole], "1/s", "to the plan's end", _GOAL_PER_S),
        figure("look_at_all_vs_few_1000", [everybody / few for everybody, few in pairs], "ratio", "the same plans"),
    ]
    scale = [figure(f"decision_us_{name}", found, "us", "for scale") for name, found in us.items()]
    return lead + scale


class _Sessions:
    """Sessions of one length, and the seconds that their requests cost the router."""

    _whole = False
    """What follows on the plan counts too."""

    def __init__(self, crowd: Crowd, tokens: int) -> None:
        self._crowd = crowd
        self._tokens = tokens
        self._numbers = iter(range(1 << 30))

    def _session(self) -> Iterator[PlanAsk]:
        return self._crowd.session(f"{self._tokens}/{next(self._numbers)}", self._tokens)

    def _timed(self, ask: PlanAsk) -> float:
        """From the ask to its plan or, as `_whole`, to the plan's end and to the reports that come meanwhile; what the
        index hears afterwards is no part."""
        crowd = self._crowd
        started = time.perf_counter()
        number = crowd.plan(ask)
        planned = time.perf_counter()
        members = crowd.planner.ledger.members(number)
        crowd.end(number)
        crowd.tick()
        ended = time.perf_counter()
        crowd.store(ask, members)
        return (ended if self._whole else planned) - started


class _Cold(_Sessions):
    """First requests: all keys are new to the router."""

    async def measure(self, round: int) -> float:
        """The median of a few, in seconds."""
        return statistics.median(self._timed(next(self._session())) for _ in range(5))


class _Warm(_Sessions):
    """The turns after them."""

    async def measure(self, round: int) -> float:
        """The median of a few turns of a few sessions, in seconds."""
        found = []
        for _ in range(3):
            session = self._session()
            self._crowd.serve(next(session))
            found += [self._timed(next(session)) for _ in range(10)]
        return statistics.median(found)


class _Whole(_Warm):
    """All that a turn costs the router."""

    _whole = True


class _All(_Warm):
    """The reference: every worker is looked at."""

    def __init__(self, crowd: Crowd) -> None:
        super().__init__(crowd, _TOKENS["10k"])

    async def measure(self, round: int) -> float:
        """As `_Warm`, in seconds."""
        shortlist = self._crowd.planner.shortlist
        counts, everybody = (shortlist.fewest, shortlist.few), 1 << 30
        shortlist.fewest, shortlist.few = everybody, everybody
        try:
            return await super().measure(round)
        finally:
            shortlist.fewest, shortlist.few = counts
