"""What every bench shares: interleaved rounds, medians with min and max, a table, one JSON object.

A bench names its subjects (what is measured, and what it is measured against). Every round measures each subject
once, in an order that alternates, so that a slow minute of a shared machine falls on all of them.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.table import Table

from penstock.bench.turns import pass_turn

Sample = TypeVar("Sample")
Measure = Callable[[int], Awaitable[Sample]]
"""Measures one subject in the round of that number."""

_VECTORS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""Processor flags, the widest first."""
_PACKAGES = ("penstock", "torch", "grpcio", "uvloop", "uvicorn", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One result. `value` is the median over the rounds; None when nothing could be measured."""

    id: str
    value: float | None
    unit: str
    min: float | None
    max: float | None
    against: str
    """What the value is a ratio to, or was measured beside."""
    goal: float | None = None
    met: bool | None = None


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All results of one bench."""

    bench: str
    figures: Sequence[Figure]
    simulated: bool = field(default=False, kw_only=True)
    """The figures are those of a made-up time: on any machine the same."""

    def json(self) -> str:
        """One object, for programs."""
        machine = {} if self.simulated else {"host": describe_host(), "versions": versions()}
        return json.dumps({"bench": self.bench, **machine, "figures": [asdict(figure) for figure in self.figures]})

    def shown(self) -> RenderableType:
        """For people."""
        return self.table()

    def table(self) -> Table:
        """The figures."""
        table = Table(title=f"penstock bench {self.bench}", title_justify="left")
        for column in ("figure", "median", "min", "max", "unit", "against", "goal", "met"):
            number = column in ("median", "min", "max", "goal")
            table.add_column(column, justify="right" if number else "left", no_wrap=column != "against")
        for figure in self.figures:
            table.add_row(*_cells(figure))
        return table


def figure(
    id: str,
    samples: Sequence[float],
    unit: str,
    against: str,
    goal: float | None = None,
    *,
    lower_is_better: bool = False,
) -> Figure:
    """A figure from one sample per round."""
    value = statistics.median(samples)
    met = None if goal is None else (value <= goal if lower_is_better else value >= goal)
    return Figure(
        id=id, value=value, unit=unit, min=min(samples), max=max(samples), against=against, goal=goal, met=met
    )


def missing(id: str, unit: str, why: str, goal: float | None = None) -> Figure:
    """A figure that could not be measured."""
    return Figure(id=id, value=None, unit=unit, min=None, max=None, against=why, goal=goal)


async def interleave(
    subjects: Mapping[str, Measure[Sample]], rounds: int, progress: bool = True, warm_up: bool = True
) -> dict[str, list[Sample]]:
    """`rounds` samples of each subject. One more round at the start, number 0, warms up and is thrown away.

    Passes the turn before each sample; see `turns`.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in subjects}
    names = list(subjects)
    with Progress(console=Console(stderr=True), disable=not (progress and sys.stderr.isatty())) as bar:
        first = 0 if warm_up else 1
        task = bar.add_task("warm-up", total=(rounds + 1 - first) * len(names))
        for number in range(first, rounds + 1):
            for name in names if number % 2 else reversed(names):
                bar.update(task, description=f"round {number} of {rounds}: {name}")
                await pass_turn()
                sample = await subjects[name](number)
                if number:
                    samples[name].append(sample)
                bar.advance(task)
    return samples


def describe_host() -> dict[str, object]:
    """The machine that a figure was measured on."""
    return {"cpu": _cpu_name(), "cores": os.cpu_count(), "system": platform.platform()}


def versions() -> dict[str, str]:
    """Of Python and of the packages that the figures depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        return cpu_name(Path("/proc/cpuinfo").read_text())
    except (OSError, KeyError):
        return platform.processor()


def cpu_name(cpuinfo: str) -> str:
    """`AMD EPYC (family 23, model 1, avx2)` from what Linux says of the first processor: virtual machines hide which of
    a maker's processors they run on, and figures differ by the widest vectors. Raises KeyError when it has no name."""
    lines = (line.partition(":") for line in cpuinfo.split("\n\n")[0].splitlines())
    first = {key.strip(): value.strip() for key, _, value in lines}
    flags = first.get("flags", "").split()
    marks = [f"{mark} {first[key]}" for mark, key in (("family", "cpu family"), ("model", "model")) if key in first]
    marks += [kind for kind in _VECTORS if kind in flags][:1]
    return first["model name"] + (f" ({', '.join(marks)})" if marks else "")


def _cells(figure: Figure) -> list[str]:
    goal = "" if figure.goal is None else f"{figure.goal:g}"
    met = {None: "", True: "yes", False: "no"}[figure.met]
    numbers = ["" if number is None else f"{number:.4g}" for number in (figure.value, figure.min, figure.max)]
    return [figure.id, *numbers, figure.unit, figure.against, goal, met]
