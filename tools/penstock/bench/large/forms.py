"""Models of the forms of DeepSeek V3 and Llama 4 beside other engines on the same bfloat16 weights, and beside our own
steps in torch; and what latent attention costs over a long context, one token at a time and where drafts are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from penstock.bench.engine.cells import PROMPT, Cell, Sitting
from penstock.bench.engine.figures import beside_best, rates
from penstock.bench.engine.limits import Memory
from penstock.bench.engine.process import Failed
from penstock.bench.engine.rounds import THREADS, Asked, CellRow, prompt
from penstock.bench.engine.rounds import measure as measure_sitting
from penstock.bench.engine.shapes import CHUNKED, LATENT, ModelShape
from penstock.bench.engine.subjects import OURS, Places, Subject
from penstock.bench.harness import Figure, figure, interleave, missing

PEERS = ("transformers",)
LONG = 4096
"""Tokens of a long context."""
_TORCH = Subject(OURS, "torch")
_CELLS = {"decode_b1": "decode", "decode_b8": "decode8", "decode_4k": "decode_4k"}
_GOAL = 1.0
_DRAFTS = {2: 2.0, 4: 3.0}
"""Drafts that a step verifies, and how many steps of one token it may take."""
_LIMIT_S = 300.0


def sitting(shape: ModelShape, quick: bool) -> Sitting:
    """Who is measured at what."""
    subjects = (Subject(OURS), _TORCH, *(Subject(name) for name in PEERS))
    cells = [
        Cell("decode_b1", PROMPT, 1, 8 if quick else 48, rounds=2 if quick else 5),
        Cell("decode_b8", 32 if quick else PROMPT, 8, 4 if quick else 16, rounds=2 if quick else 5),
    ]
    if shape is LATENT and not quick:
        cells.append(Cell("decode_4k", LONG, 1, 12, rounds=3))
    return Sitting(shape, subjects, tuple(cells))


def figures_of(shape: ModelShape, rows: Sequence[CellRow]) -> list[Figure]:
    """Of each cell, our kernels : the best peer, and : our steps in torch; and everybody's tokens/s."""
    found = []
    for cell in dict.fromkeys(row.cell for row in rows):
        others = [row for row in rows if row.cell == cell and row.subject != Subject(OURS)]
        rivals = [row for row in others if row.subject != _TORCH]
        found.append(beside_best(f"{shape.name}_{_CELLS[cell]}_vs_best", rivals, _GOAL))
        own = [row for row in others if row.subject == _TORCH]
        ours = beside_best(f"{shape.name}_{_CELLS[cell]}_vs_torch", own, _GOAL)
        found.append(ours if ours.value is None else replace(ours, against="our own steps in torch"))
    return [*found, *rates(rows)]


async def form_figures(quick: bool) -> Sequence[Figure]:
    """Runs the part."""
    torch.set_num_threads(THREADS)
    places, found = Places.default(), []
    for shape in (LATENT, CHUNKED):
        rows = await measure_sitting(sitting(shape, quick), places, Memory(THREADS))
        found += figures_of(shape, rows)
    return [*found, *await _verifying(places, *((2, 2) if quick else (5, 6)))]


async def _verifying(places: Places, rounds: int, steps: int) -> list[Figure]:
    room = {"threads": THREADS, "streams": 1, "tokens": LONG + 64, "room": LONG + 64, "drafts": True}
    ours = Asked(Subject(OURS), places, LATENT, room)

    async def sample(drafts: int, number: int) -> float:
        text = prompt(LATENT, LONG, number)
        found = await ours.ask("verify", _LIMIT_S, prompt=text, steps=steps, drafts=drafts)
        ratio: float = found["verify_s"] / found["step_s"]
        return ratio

    ids = {drafts: f"deepseek_verify{drafts + 1}_4k_vs_step" for drafts in _DRAFTS}
    try:
        costs = await interleave({id: partial(sample, drafts) for drafts, id in ids.items()}, rounds)
    except Failed as error:
        return [missing(ids[drafts], "ratio", str(error), goal) for drafts, goal in _DRAFTS.items()]
    finally:
        await ours.close()
    against = f"a step of one token behind {LONG:,} tokens"
    return [
        figure(ids[drafts], costs[ids[drafts]], "ratio", against, goal, lower_is_better=True)
        for drafts, goal in _DRAFTS.items()
    ]
