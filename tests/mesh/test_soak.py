"""Two minutes of `penstock bench soak`: faults every few seconds, clients that leave, and nothing is left behind."""

from __future__ import annotations

from dataclasses import replace

from penstock.bench.soak.measure import soak
from penstock.bench.soak.options import QUICK

OPTIONS = replace(QUICK, requests=100_000, seconds=60.0, calm=60, seed=5)
"""As many requests as there are in a minute."""


async def test_faults_every_few_seconds_lose_nothing_and_leak_nothing() -> None:
    """How fast it is, and whether memory grows, the bench says: a minute is too short for that."""
    report = await soak(OPTIONS)
    said = "\n".join([f"seed {report.seed}, {report.faults}", *report.problems, *report.complaints])
    figures = {figure.id: figure for figure in report.figures()}
    assert not report.problems, said
    for name in ("streams_lost", "tokens_wrong", "leaks"):
        assert figures[name].value == 0, said
    assert sum(report.faults.values()) >= 10, said
    assert report.tally.done >= 300, said
    assert report.tally.left >= 50, said
    assert report.tally.pause_s < OPTIONS.deadline_s / 2, said
