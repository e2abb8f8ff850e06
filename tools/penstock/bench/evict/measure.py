"""`penstock bench evict`: what each eviction policy saves on recorded requests, beside LRU and the offline optimum.

The replays run in processes of the KV store's own package, through its block table: one process per trace, as many at
a time as there are cores. This module starts them, and makes a table of what they say.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.bench.evict.comparisons import HINTED, Comparison, Row, comparisons
from penstock.bench.harness import BenchReport, Figure
from penstock.runtime.config import ConfigError

TRACES = Path("../shared/traces")
_DERIVED = "_hash16"
_NOISE = 0.98
"""Outside of the range a ratio of this or more is as good as 1."""


@dataclass(frozen=True, slots=True)
class EvictReport(BenchReport):
    """Figures, and all replays."""

    traces: Sequence[Row]
    places: Sequence[Comparison]

    def json(self) -> str:
        """The report and all replays, as one object."""
        replays = [row for place in self.places for row in place.rows.values()]
        return json.dumps({**json.loads(BenchReport.json(self)), "traces": list(self.traces), "replays": replays})

    def shown(self) -> RenderableType:
        """A table per trace, then the figures."""
        return Group(*(_table(row, self.places) for row in self.traces), BenchReport.table(self))


async def measure(traces: Sequence[Path], quick: bool) -> EvictReport:
    """Runs the bench. Raises ConfigError on a path that is not there or can't be used."""
    for path in traces:
        if not path.is_file():
            raise ConfigError("trace", str(path), "there is no such file")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        replays = _Replays(quick, bar)
        try:
            async with asyncio.TaskGroup() as tasks:
                for path in traces:
                    for overlay in (False, True) if _has_sessions(path) else (False,):
                        tasks.create_task(replays.run(path, overlay))
        except* ConfigError as errors:
            raise errors.exceptions[0] from None
    heads = sorted(replays.heads, key=lambda head: -head["requests"])
    places = comparisons(heads, replays.rows)
    return EvictReport("evict", _figures(places), heads, places)


def default_traces(directory: Path = TRACES) -> list[Path]:
    """All traces of a directory that have block ids or texts. Raises ConfigError when there is none.

    A text of which block ids were derived is left out.
    """
    found = sorted(directory.glob("*.jsonl.gz")) if directory.is_dir() else []
    names = {path.name for path in found}
    kept = [path for path in found if path.name.replace(".jsonl", f"{_DERIVED}.jsonl") not in names]
    if not kept:
        raise ConfigError("trace", str(directory), "no trace is there: name files with --trace")
    return kept


def _has_sessions(path: Path) -> bool:
    """A guess from the first line; the replay itself checks it."""
    import gzip

    try:
        with gzip.open(path, "rt") if path.name.endswith(".gz") else open(path) as lines:
            return bool({"session", "session_id"} & json.loads(lines.readline()).keys())
    except (OSError, ValueError, AttributeError):
        return False


class _Replays:
    """Runs replays in processes of their own, as many at a time as there are cores, and keeps what they print."""

    def __init__(self, quick: bool, bar: Progress) -> None:
        self.heads: list[Row] = []
        self.rows: list[Row] = []
        self._quick = quick
        self._bar = bar
        self._seats = asyncio.Semaphore(os.cpu_count() or 1)

    async def run(self, path: Path, overlay: bool) -> None:
        """Replays one trace. Raises ConfigError when it can't be replayed."""
        options = [*(["--overlay"] if overlay else []), *(["--quick"] if self._quick else [])]
        async with self._seats:
            command = (sys.executable, "-m", "penstock.bench.evict", str(path), *options)
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
            assert process.stdout is not None and process.stderr is not None
            try:
                await self._read(process.stdout)
                errors: str = (await process.stderr.read()).decode(errors="replace").strip()
                if await process.wait():
                    raise ConfigError("trace", str(path), errors or f"the replay ended with {process.returncode}")
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    async def _read(self, lines: asyncio.StreamReader) -> None:
        """The first line describes the trace, every other one is a replay."""
        task = None
        async for line in lines:
            row = json.loads(line)
            if task is None:
                self.heads.append(row)
                task = self._bar.add_task(row["trace"], total=row["replays"])
            else:
                self.rows.append(row)
                self._bar.advance(task)


def _figures(places: Sequence[Comparison]) -> list[Figure]:
    recorded = [place for place in places if not place.overlay]
    inside = [place for place in recorded if place.counts]
    outside = [place for place in recorded if not place.counts]
    overlaid = [place for place in places if place.overlay and place.counts]
    hinted = [place for place in overlaid if HINTED in place.rows]
    lru = "LRU where it saves 30 to 90% of the best offline schedule"
    overlay = "LRU, sessions overlaid"
    figures = [
        _figure("seconds_saved_vs_lru_min", _ratios(inside, "worth", "lru"), min, lru, 1.0),
        _figure("seconds_saved_vs_lru_median", _ratios(inside, "worth", "lru"), _median, lru),
        _figure("seconds_saved_vs_lru_elsewhere_min", _ratios(outside, "worth", "lru"), min, "LRU elsewhere", _NOISE),
        _figure("seconds_saved_vs_s3fifo_min", _ratios(inside, "worth", "s3-fifo"), min, "S3-FIFO, same places"),
        _figure("seconds_saved_vs_best_median", _ratios(inside, "worth", "offline"), _median, "offline, same places"),
        _figure("lru_seconds_saved_vs_best_median", _ratios(inside, "lru", "offline"), _median, "offline, same places"),
        _figure("overlaid_seconds_saved_vs_lru_min", _ratios(overlaid, "worth", "lru"), min, "LRU, sessions overlaid"),
        _figure("overlaid_hints_seconds_saved_vs_lru_min", _ratios(hinted, HINTED, "lru"), min, overlay),
        _figure("overlaid_hints_seconds_saved_vs_lru_median", _ratios(hinted, HINTED, "lru"), _median, "LRU, overlaid"),
    ]
    return [figure for figure in figures if figure is not None]


def _ratios(places: Iterable[Comparison], policy: str, to: str) -> list[float]:
    return [place.ratio(policy, to) for place in places]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _figure(id: str, ratios: Sequence[float], value: Any, against: str, goal: float | None = None) -> Figure | None:
    """A figure over places; None where there is none."""
    if not ratios:
        return None
    one: float = value(ratios)
    met = None if goal is None else one > goal
    return Figure(id=id, value=one, unit="ratio", min=min(ratios), max=max(ratios), against=against, goal=goal, met=met)


def _table(head: Row, places: Iterable[Comparison]) -> Table:
    """One trace, a line per room."""
    title = (
        f"{head['trace']}: {head['requests']:,} requests, {head['blocks']:,} blocks of {head['block_tokens']} tokens"
    )
    table = Table(title=title, title_justify="left")
    for column in ("room", "blocks: LRU", "ours", "best", "tokens: LRU", "ours", "best", "seconds: LRU/best"):
        table.add_column(column, justify="right")
    for column in ("s3/LRU", "ours/LRU", "hints/LRU", "best/LRU"):
        table.add_column(column, justify="right")
    for place in places:
        if place.trace == head["trace"]:
            table.add_row(*_cells(place))
    return table


def _cells(place: Comparison) -> list[str]:
    rows = place.rows
    hits = [f"{100 * rows[policy]['block_hit']:.1f}%" for policy in ("lru", "worth", "offline")]
    tokens = [f"{100 * rows[policy]['token_hit']:.1f}%" for policy in ("lru", "worth", "offline")]
    ratios = [
        f"{place.ratio(policy, 'lru'):.3f}" if policy in rows else ""
        for policy in ("s3-fifo", "worth", HINTED, "offline")
    ]
    room = " + ".join(f"{capacity:,}" for capacity in place.capacities)
    return [room, *hits, *tokens, f"{place.reach:.2f}{' *' if place.counts else ''}", *ratios]
