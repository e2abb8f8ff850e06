"""How many architectures compute what transformers computes: by the tests that compare them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Sequence

from penstock.bench.harness import Figure, figure
from penstock.bench.own_tests import reported

_TESTS = ("tests/libs/engine/test_families.py", "tests/libs/engine/test_oracle.py")
_PROPERTY = "architecture"
"""That each of the tests reports: what config.json names."""


async def family_figures(quick: bool) -> Sequence[Figure]:
    """Runs the tests, of a checkout; `quick`: those of whole prompts alone."""
    return families(await reported("families", [*_TESTS, *(["-k", "logit"] if quick else [])]))


def families(report: str) -> list[Figure]:
    """Of a report of pytest in JUnit's form. An architecture counts when all of its tests have passed. Raises
    ValueError when no test names one."""
    passed: dict[str, list[bool]] = defaultdict(list)
    for case in ElementTree.fromstring(report).iter("testcase"):
        names = [each.get("value", "") for each in case.iter("property") if each.get("name") == _PROPERTY]
        failed = any(case.find(what) is not None for what in ("failure", "error", "skipped"))
        for name in names:
            passed[name].append(not failed)
    if not passed:
        raise ValueError("no test of the report names an architecture")
    equal, tests = [name for name, each in passed.items() if all(each)], sum(map(len, passed.values()))
    against = f"{len(passed)} tried, in {tests} tests: transformers in float32, all positions, 1e-4"
    return [figure("oracle_families", [float(len(equal))], "architectures", against, len(passed))]
