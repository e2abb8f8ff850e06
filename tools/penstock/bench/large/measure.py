"""`penstock bench large`: the figures of all parts that are registered here."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.bench.harness import BenchReport
from penstock.bench.large.experts import expert_figures
from penstock.bench.large.lora import lora_figures
from penstock.bench.large.ranks import rank_figures
from penstock.bench.parts import Parts, measured

PARTS: Parts = {
    "experts": expert_figures,
    "ranks": rank_figures,
    "lora": lora_figures,
}


async def measure(quick: bool, wanted: Sequence[str] = ()) -> BenchReport:
    """The parts that are wanted, in the order above; all without names. Raises ConfigError for one that there is
    not."""
    return BenchReport("large", await measured(PARTS, quick, wanted))
