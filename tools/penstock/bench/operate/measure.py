"""The parts of `penstock bench operate`, and its report."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from penstock.bench.harness import BenchReport, Figure
from penstock.bench.operate.batch import measure_batch

PARTS: Mapping[str, Callable[[bool], Coroutine[Any, Any, Sequence[Figure]]]] = {"batch": measure_batch}


async def measure(quick: bool, parts: Sequence[str] = ()) -> BenchReport:
    """Runs the parts, all if none is named."""
    return BenchReport("operate", [one for name in parts or PARTS for one in await PARTS[name](quick)])
