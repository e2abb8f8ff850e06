"""The attacks among the tests: how many are tried, and how many succeed."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

from penstock.bench.harness import Figure, figure
from penstock.bench.own_tests import reported


async def attack_figures(quick: bool) -> Sequence[Figure]:
    """Runs the tests with the mark `attack`, of a checkout; `quick`: those of keys, seals and certificates alone."""
    wanted = ["tests/libs/rpc", "tests/libs/kv"] if quick else ["tests"]
    return attacks(await reported("attacks", ["-m", "attack", *wanted]))


def attacks(report: str) -> list[Figure]:
    """Of a report of pytest in JUnit's form. What was skipped was not tried."""
    suites = ElementTree.fromstring(report).iter("testsuite")
    counts = [
        {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")} for suite in suites
    ]
    tried = sum(one["tests"] - one["skipped"] for one in counts)
    succeeded = sum(one["failures"] + one["errors"] for one in counts)
    return [
        figure("attacks_tried", [float(tried)], "attacks", "tests with the mark `attack`"),
        figure("attacks_succeeded", [float(succeeded)], "attacks", "of those tried", 0, lower_is_better=True),
    ]
