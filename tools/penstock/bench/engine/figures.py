"""From samples to figures. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from penstock.bench.engine.rounds import CellRow, CellSample
from penstock.bench.engine.subjects import OURS
from penstock.bench.harness import Figure, figure, missing

_GOALS = {
    "decode_b1_1b": 1.0,
    "decode_b1_135m": 1.0,
    "decode_b8_1b": 1.0,
    "decode_b8_135m": 1.0,
    "decode_b32_1b": 1.1,
    "decode_b32_135m": 1.1,
    "prefill_512_1b": 1.0,
    "prefill_2048_1b": 1.0,
    "prefill_512_135m": 0.9,
    "prefill_2048_135m": 0.9,
}
"""Of ours to the best peer's, with bfloat16 weights."""


def compared(rows: Sequence[CellRow]) -> list[Figure]:
    """Our bfloat16 beside the best peer, for every cell that was measured or should have been."""
    found = []
    for name, goal in _GOALS.items():
        shape = name.rpartition("_")[2]
        cell = name.removesuffix(f"_{shape}")
        rivals = [
            row
            for row in rows
            if (row.shape, row.cell, row.subject.kind) == (shape, cell, "bfloat16") and row.subject.engine != OURS
        ]
        found.append(beside_best(f"{name}_bf16_vs_best", rivals, goal))
    return found


def beside_best(id: str, rivals: Sequence[CellRow], goal: float | None) -> Figure:
    """Ours : the best of `rivals`, round by round; the best is the one beside which ours looks worst."""
    measured = [(row, ratios) for row in rivals if (ratios := _ratios(row))]
    if not measured:
        reasons = "; ".join(f"{row.subject.name}: {row.absent}" for row in rivals if row.absent)
        return missing(id, "ratio", f"no peer was measured: {reasons or 'left out by --quick'}", goal)
    row, ratios = min(measured, key=lambda one: statistics.median(one[1]))
    return figure(id, ratios, "ratio", f"best peer: {row.subject.name}", goal)


def beside_memory(id: str, row: CellRow | None, weights: int, goal: float | None) -> Figure:
    """How much of the memory's read rate, right before and after, goes into reading `weights` bytes per token."""
    samples = _sound(row.samples) if row is not None else []
    if not samples:
        return missing(id, "ratio", "not measured", goal)
    shares = [rate * weights / memory for rate, memory in samples]
    return figure(id, shares, "ratio", "reading the weights, right before and after", goal)


def rates(rows: Sequence[CellRow]) -> list[Figure]:
    """Tokens/s of every subject in every cell, and why there are none."""
    return [_rate(row) for row in _merged(rows)]


def memory_rates(rows: Sequence[CellRow]) -> list[Figure]:
    """What memory gave around the cells of decoding alone."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.cell == "decode_b1" and row.subject.kind == "bfloat16":
            found.setdefault(row.shape, []).extend(memory / 1e9 for _, memory in _sound(row.samples))
    return [
        figure(f"memory_read_gbs_{shape}", samples, "GB/s", "2 threads, before and after samples of decode_b1")
        for shape, samples in found.items()
        if samples
    ]


def find(rows: Sequence[CellRow], shape: str, cell: str, name: str) -> CellRow | None:
    """The first row of a subject that has samples."""
    wanted = (shape, cell, name)
    return next((row for row in rows if (row.shape, row.cell, row.subject.name) == wanted and not row.absent), None)


def _rate(row: CellRow) -> Figure:
    id = f"{row.cell}_{row.shape}_{row.subject.name.replace(' ', '_')}_tokens_per_s"
    samples = [rate for rate, _ in _sound(row.samples)]
    return figure(id, samples, "tokens/s", "for scale") if samples else missing(id, "tokens/s", row.absent)


def _merged(rows: Sequence[CellRow]) -> Iterator[CellRow]:
    """One row for each subject of a cell: ours may have taken part in several groups."""
    together: dict[tuple[str, str, str], list[CellRow]] = {}
    for row in rows:
        together.setdefault((row.shape, row.cell, row.subject.name), []).append(row)
    for several in together.values():
        one = several[0]
        yield CellRow(one.shape, one.cell, one.subject, [sample for row in several for sample in row.samples], ())


def _ratios(row: CellRow) -> list[float]:
    """Ours : theirs, of the rounds in which both were measured."""
    return [
        ours.rate / theirs.rate
        for ours, theirs in zip(row.first, row.samples, strict=True)
        if ours.rate is not None and theirs.rate is not None
    ]


def _sound(samples: Sequence[CellSample]) -> list[tuple[float, float]]:
    """(rate, memory) of samples that have a rate."""
    return [(sample.rate, sample.memory) for sample in samples if sample.rate is not None]
