"""What the bench prints for people: the comparisons, then a table for every cell."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table

from penstock.bench.e2e.figures import merged
from penstock.bench.e2e.subjects import ServerRow
from penstock.bench.harness import BenchReport

_COLUMNS = {
    "tokens/s": "output_token_throughput",
    "TTFT p50 ms": "time_to_first_token_p50",
    "turn 1": "time_to_first_token_turn1_p50",
    "turn 2": "time_to_first_token_turn2_p50",
    "ITL p50": "inter_token_latency_p50",
    "gap p90": "inter_token_gap_p90",
    "latency p50": "request_latency_p50",
    "cached": "cached_share",
    "refusals": "refusals",
    "CPU s/1k": "cpu_s_per_1k",
    "MB": "memory_mb",
}


@dataclass(frozen=True, slots=True)
class E2eReport(BenchReport):
    """The figures, and the rows that they came from."""

    rows: Sequence[ServerRow] = ()

    def shown(self) -> RenderableType:
        """For people."""
        ratios = BenchReport(self.bench, [each for each in self.figures if each.against != "for scale"])
        rows = merged(self.rows)
        names = list(dict.fromkeys(row.cell for row in rows))
        return Group(ratios.table(), *(_table(name, [row for row in rows if row.cell == name]) for name in names))


def _table(name: str, rows: Sequence[ServerRow]) -> Table:
    table = Table(title=f"{name}, medians", title_justify="left")
    table.add_column("server", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row.server, *(_cell(row, value) for value in _COLUMNS.values()))
    table.caption = "; ".join(f"{row.server}: {row.absent}" for row in rows if row.absent)
    return table


def _cell(row: ServerRow, value: str) -> str:
    samples = row.of(value)
    return f"{statistics.median(samples):.4g}" if samples else ""
