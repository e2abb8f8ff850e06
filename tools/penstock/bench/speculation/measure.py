"""`penstock bench speculation`: what drafts are worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from penstock.bench.harness import BenchReport, Figure
from penstock.bench.speculation.branches import branch_figures
from penstock.bench.speculation.delays import delay_figures
from penstock.bench.speculation.heads import head_figures
from penstock.bench.speculation.meshes import checkpoints, mesh_figures
from penstock.bench.speculation.peers import peer_figures
from penstock.bench.speculation.replay import EXCERPT, replay_figures
from penstock.bench.speculation.rows import row_figures
from penstock.bench.speculation.trees import tree_figures

SpeculationPart = Literal["replay", "trees", "rows", "mesh", "branches", "delay", "heads", "peers"]


async def measure(
    quick: bool, parts: Sequence[SpeculationPart] = (), traces: Sequence[Path] = (), head: Path | None = None
) -> BenchReport:
    """Runs the bench; without `parts` all of them, without `traces` over the excerpt in the repository. `head` is one
    for the embedded model. Raises ConfigError on a path that can't be used."""
    found: list[Figure] = []
    if not parts or "replay" in parts:
        found += replay_figures(traces or (EXCERPT,), quick)
    if not parts or "trees" in parts:
        found += tree_figures(traces or (EXCERPT,), quick)
    if not parts or "rows" in parts:
        found += await row_figures(quick)
    if not parts or "mesh" in parts:
        found += await mesh_figures(quick)
    if not parts or "branches" in parts:
        found += await branch_figures(quick)
    if not parts or "delay" in parts:
        found += await delay_figures(quick)
    if not parts or "heads" in parts:
        found += await head_figures(head, quick)
    if not parts or "peers" in parts:
        found += await peer_figures(*checkpoints("bound"), quick)
    return BenchReport("speculation", found)
