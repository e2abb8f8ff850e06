"""`penstock bench operate`: the figures of all parts that are registered here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.bench import batch, scale
from penstock.bench.harness import BenchReport, Figure
from penstock.bench.operate.console import console_figures
from penstock.bench.operate.images import image_figures
from penstock.bench.operate.load import load_figures
from penstock.bench.parts import Parts, measured


async def _batch_figures(quick: bool) -> Sequence[Figure]:
    return (await batch.measure(quick)).figures


async def _planner_figures(quick: bool) -> Sequence[Figure]:
    return (await asyncio.to_thread(scale.measure, quick)).figures


PARTS: Parts = {
    "load": load_figures,
    "batch": _batch_figures,
    "planner": _planner_figures,
    "console": console_figures,
    "images": image_figures,
}


async def measure(quick: bool, wanted: Sequence[str] = ()) -> BenchReport:
    """The parts that are wanted, in the order above; all without names. Raises ConfigError for one that there is
    not."""
    return BenchReport("operate", await measured(PARTS, quick, wanted))
