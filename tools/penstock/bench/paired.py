"""`penstock bench paired OTHER NAME`: the same bench in two checkouts, in turns, and the ratio of each figure.

One run after another would compare a quiet minute with a busy one. Here every round runs the bench in both checkouts
at the same time, and they take turns sample by sample (see `turns`), so that each sample has its twin within a moment.
Who goes first alternates with the rounds, and a figure's ratio is taken within each round.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from penstock.bench.harness import describe_host
from penstock.bench.turns import TurnRun, take_turns
from penstock.runtime.config import ConfigError

_LESS = frozenset({"ms", "us", "s", "MB", "bytes"})
_MORE = frozenset({"tokens/s", "GB/s", "1/s", "GFLOP/s"})

Run = Mapping[str, Any]
"""The JSON object of one run of a bench."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One figure, this checkout's beside the other's, over all rounds."""

    id: str
    unit: str
    here: float
    """Median over the rounds."""
    other: float
    """Median of the other checkout."""
    median: float
    """Of this checkout's : the other's, round by round; of their differences where the figure can be below zero."""
    min: float
    max: float
    kind: str
    """`ratio` or `difference`."""
    better: str
    """`more`, `less`, or empty where nothing tells which."""


@dataclass(frozen=True, slots=True)
class PairedReport:
    """All figures that both checkouts have, and the names of those that only one has."""

    bench: str
    rounds: int
    ratios: Sequence[Ratio]
    unpaired: Sequence[str]

    def json(self) -> str:
        """One object, for programs."""
        return json.dumps({"bench": f"paired {self.bench}", "host": describe_host(), **asdict(self)})

    def shown(self) -> RenderableType:
        """For people."""
        table = Table(
            title=f"penstock bench {self.bench}: here : the other, {self.rounds} rounds", title_justify="left"
        )
        table.add_column("figure", no_wrap=True)
        for column in ("here : other", "min", "max", "here", "other"):
            table.add_column(column, justify="right")
        table.add_column("unit")
        table.add_column("better")
        for ratio in self.ratios:
            numbers = (ratio.median, ratio.min, ratio.max)
            sides = (f"{ratio.here:.4g}", f"{ratio.other:.4g}")
            sign = "+.3g" if ratio.kind == "difference" else ".3f"
            table.add_row(ratio.id, *(f"{number:{sign}}" for number in numbers), *sides, ratio.unit, ratio.better)
        if self.unpaired:
            table.caption = f"not in both: {', '.join(self.unpaired)}"
        return table


@dataclass(frozen=True, slots=True)
class Checkout:
    """Where a bench runs, and the Python that runs it there."""

    directory: Path
    python: Path


def checkout(directory: Path) -> Checkout:
    """A checkout with a .venv of its own. Raises ConfigError without one."""
    python = directory.resolve() / ".venv" / "bin" / "python"
    if not python.exists():
        raise ConfigError("other", str(directory), "there is no .venv/bin/python in it: make setup there")
    return Checkout(directory.resolve(), python)


async def measure(here: Checkout, other: Checkout, name: str, *, rounds: int, quick: bool) -> PairedReport:
    """Runs the bench `name` in both checkouts, `rounds` times each. Raises ConfigError where it can't run."""
    sides = {"here": here, "other": other}
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        first, second = order(number)
        async with _run(sides[first], name, quick) as one, _run(sides[second], name, quick) as two:
            await take_turns([one, two])
            for side, run in ((first, one), (second, two)):
                runs[side].append(_said(run, sides[side], name))
    return compared(name, runs["here"], runs["other"])


def order(round: int) -> tuple[str, str]:
    """Who goes first takes turns."""
    return ("here", "other") if round % 2 == 0 else ("other", "here")


def compared(name: str, here: Sequence[Run], other: Sequence[Run]) -> PairedReport:
    """Pairs the runs of each round."""
    ours, theirs = [list(map(_figures, runs)) for runs in (here, other)]
    ids = list(dict.fromkeys(id for figures in (*ours, *theirs) for id in figures))
    ratios, unpaired = [], []
    for id in ids:
        pairs = [
            (mine[id]["value"], its[id]["value"])
            for mine, its in zip(ours, theirs, strict=True)
            if all(side.get(id, {}).get("value") is not None for side in (mine, its))
        ]
        if pairs:
            ratios.append(_ratio(next(side[id] for side in ours if id in side), pairs))
        else:
            unpaired.append(id)
    return PairedReport(name, len(here), ratios, unpaired)


def _ratio(figure: Mapping[str, Any], pairs: Sequence[tuple[float, float]]) -> Ratio:
    kind = "ratio" if all(min(pair) > 0 for pair in pairs) else "difference"
    shares = [mine / its if kind == "ratio" else mine - its for mine, its in pairs]
    mine, its = (statistics.median(side) for side in zip(*pairs, strict=True))
    return Ratio(
        id=figure["id"],
        unit=figure["unit"],
        here=mine,
        other=its,
        median=statistics.median(shares),
        min=min(shares),
        max=max(shares),
        kind=kind,
        better=_better(figure),
    )


def _better(figure: Mapping[str, Any]) -> str:
    """From the goal where there is one, else from the unit."""
    value, goal, met = figure["value"], figure["goal"], figure["met"]
    if isinstance(value, float) and isinstance(goal, float) and value != goal:
        return "more" if met is (value > goal) else "less"
    if figure["unit"] in _LESS:
        return "less"
    return "more" if figure["unit"] in _MORE else ""


def _figures(run: Run) -> dict[str, dict[str, Any]]:
    return {figure["id"]: figure for figure in run["figures"]}


def _run(where: Checkout, name: str, quick: bool) -> TurnRun:
    command = [str(where.python), "-m", "penstock.cli", "bench", name, "--json", *(["--quick"] if quick else [])]
    return TurnRun(command, where.directory)


def _said(run: TurnRun, where: Checkout, name: str) -> Run:
    status, said = run.result()
    if status:
        raise ConfigError("name", name, f"the bench ended with {status} in {where.directory}")
    found: Run = json.loads(said)
    return found
