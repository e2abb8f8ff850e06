"""`penstock bench large`: the figures of all parts that are registered here."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.bench.harness import BenchReport
from penstock.bench.large.experts import expert_figures
from penstock.bench.large.families import family_figures
from penstock.bench.large.fetching import fetch_figures
from penstock.bench.large.forms import form_figures
from penstock.bench.large.kv_bytes import kv_figures
from penstock.bench.large.lora import lora_figures
from penstock.bench.large.pictures import picture_figures
from penstock.bench.large.ranks import rank_figures
from penstock.bench.parts import Parts, measured

PARTS: Parts = {
    "families": family_figures,
    "kv": kv_figures,
    "fetch": fetch_figures,
    "experts": expert_figures,
    "forms": form_figures,
    "ranks": rank_figures,
    "lora": lora_figures,
    "pictures": picture_figures,
}


async def measure(quick: bool, wanted: Sequence[str] = ()) -> BenchReport:
    """The parts that are wanted, in the order above; all without names. Raises ConfigError for one that there is
    not."""
    return BenchReport("large", await measured(PARTS, quick, wanted))
