"""The attacks among the tests: how many are tried, and how many succeed."""

from __future__ import annotations

import asyncio
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.bench.harness import Figure, figure
from penstock.runtime.config import ConfigError

_ROOT = Path(__file__).parents[4]
_RAN = (0, 1)
"""Exit codes of pytest after tests that have run: all passed, or some failed."""


async def attack_figures(quick: bool) -> Sequence[Figure]:
    """Runs the tests with the mark `attack`, of a checkout; `quick`: those of keys, seals and certificates alone."""
    if not (_ROOT / "tests").is_dir():
        raise ConfigError("part", "attacks", "runs tests, so it needs a checkout")
    wanted = ["tests/libs/rpc", "tests/libs/kv"] if quick else ["tests"]
    with TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        words = (sys.executable, "-m", "pytest", "-q", "-m", "attack", f"--junitxml={report}", *wanted)
        process = await asyncio.create_subprocess_exec(
            *words, cwd=_ROOT, env={**os.environ}, stdout=sys.stderr, stderr=sys.stderr
        )
        if await process.wait() not in _RAN:
            raise RuntimeError(f"pytest ended with {process.returncode}")
        return attacks(report.read_text())


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
