"""`penstock bench operate`: the figures of all parts that are registered here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from penstock.bench import batch, scale
from penstock.bench.harness import BenchReport, Figure
from penstock.bench.operate.console import console_figures
from penstock.bench.operate.images import image_figures
from penstock.bench.operate.load import load_figures
from penstock.runtime.config import ConfigError


async def _batch_figures(quick: bool) -> Sequence[Figure]:
    return (await batch.measure(quick)).figures


async def _planner_figures(quick: bool) -> Sequence[Figure]:
    return (await asyncio.to_thread(scale.measure, quick)).figures


PARTS: Mapping[str, Callable[[bool], Coroutine[Any, Any, Sequence[Figure]]]] = {
    "load": load_figures,
    "batch": _batch_figures,
    "planner": _planner_figures,
    "console": console_figures,
    "images": image_figures,
}
"""By name. Each takes whether it shall be quick."""


async def measure(quick: bool, wanted: Sequence[str] = ()) -> BenchReport:
    """The parts that are wanted, in the order above; all without names. Raises ConfigError for one that there is
    not."""
    for name in wanted:
        if name not in PARTS:
            raise ConfigError("part", name, f"must be one of {', '.join(PARTS)}")
    found = [await part(quick) for name, part in PARTS.items() if not wanted or name in wanted]
    return BenchReport("operate", [figure for figures in found for figure in figures])
