"""`penstock bench speculation`: what drafts are worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from penstock.bench.harness import BenchReport, Figure
from penstock.bench.speculation.delays import delay_figures
from penstock.bench.speculation.meshes import checkpoints, mesh_figures
from penstock.bench.speculation.peers import peer_figures
from penstock.bench.speculation.replay import EXCERPT, replay_figures

SpeculationPart = Literal["replay", "mesh", "delay", "peers"]


async def measure(quick: bool, parts: Sequence[SpeculationPart] = (), traces: Sequence[Path] = ()) -> BenchReport:
    """Runs the bench; without `parts` all of them, without `traces` over the excerpt in the repository. Raises
    ConfigError on a path that can't be used."""
    found: list[Figure] = []
    if not parts or "replay" in parts:
        found += replay_figures(traces or (EXCERPT,), quick)
    if not parts or "mesh" in parts:
        found += await mesh_figures(quick)
    if not parts or "delay" in parts:
        found += await delay_figures(quick)
    if not parts or "peers" in parts:
        found += await peer_figures(*checkpoints("bound"), quick)
    return BenchReport("speculation", found)
