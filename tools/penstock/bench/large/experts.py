"""A model of experts beside llama.cpp and transformers on the same bfloat16 weights: one stream, and eight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.bench.engine.cells import PROMPT, Cell, Sitting
from penstock.bench.engine.figures import beside_best, rates
from penstock.bench.engine.limits import Memory
from penstock.bench.engine.rounds import THREADS, CellRow
from penstock.bench.engine.rounds import measure as measure_sitting
from penstock.bench.engine.shapes import MIXED
from penstock.bench.engine.subjects import OURS, Places, Subject
from penstock.bench.harness import Figure

PEERS = ("llamacpp", "transformers")
_FIGURES = {"decode_b1": "moe_decode_vs_best", "decode_b8": "moe_decode8_vs_best"}
_GOAL = 1.0


def sitting(quick: bool) -> Sitting:
    """Who is measured at what."""
    subjects = tuple(Subject(name) for name in (OURS, *PEERS))
    if quick:
        return Sitting(MIXED, subjects, (Cell("decode_b1", PROMPT, 1, 8, rounds=2), Cell("decode_b8", 32, 8, 4, 2)))
    return Sitting(
        MIXED,
        subjects,
        (Cell("decode_b1", PROMPT, 1, 48, rounds=5), Cell("decode_b8", PROMPT, 8, 16, rounds=5)),
    )


def figures_of(rows: Sequence[CellRow]) -> list[Figure]:
    """Our bfloat16 : the best peer's, and everybody's tokens/s."""
    found = []
    for cell, id in _FIGURES.items():
        rivals = [row for row in rows if row.cell == cell and row.subject.engine != OURS]
        found.append(beside_best(id, rivals, _GOAL))
    return [*found, *rates(rows)]


async def expert_figures(quick: bool) -> Sequence[Figure]:
    """Runs the part."""
    torch.set_num_threads(THREADS)
    return figures_of(await measure_sitting(sitting(quick), Places.default(), Memory(THREADS)))
