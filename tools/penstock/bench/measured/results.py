"""Kept results of a bench, and how their figures are written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOTHING = "n/a"
"""Stands where a run has no such figure."""


class Results:
    """What one run of one bench left behind: its JSON object, with figures by name."""

    def __init__(self, data: Mapping[str, Any], *more: Results) -> None:
        """`more` adds its figures."""
        self.data = data
        self._figures = {figure["id"]: figure for figure in data.get("figures", ())}
        self._elsewhere: dict[str, str] = {}
        """Machines of figures that were measured on another one."""
        for other in more:
            self._figures |= other._figures
            if "host" in other.data and other.machine != self.machine:
                self._elsewhere |= dict.fromkeys(other._figures, other.machine)

    @classmethod
    def read(cls, path: Path, *, apart: str | None = None) -> Results:
        """From a file, and those beside it that hold more figures of the same machine, as `e2e.1b.json` does beside
        `e2e.json`, or of none, as simulations do; figures whose names begin with `apart` may be of others too. Raises
        OSError, ValueError."""
        parts = [cls(json.loads(part.read_text("utf-8"))) for part in sorted(path.parent.glob(f"{path.stem}.*.json"))]
        whole = cls(json.loads(path.read_text("utf-8")), *parts)
        for id, machine in whole._elsewhere.items():
            if apart is None or not id.startswith(apart):
                raise ValueError(f"{path.parent}: a part of {path.name} was measured on {machine}")
        return whole

    def elsewhere(self, begin: str) -> str:
        """A paragraph where the first figure whose name begins so was measured on another machine than the whole."""
        id = next((id for id in self._figures if id.startswith(begin)), "")
        return f"\nThis part was measured on {self._elsewhere[id]}.\n" if id in self._elsewhere else ""

    def value(self, id: str) -> float | None:
        """The median; None where nothing was measured."""
        value: float | None = self._figures.get(id, {}).get("value")
        return value

    def ids(self) -> Sequence[str]:
        """Of all figures, in their order."""
        return [*self._figures]

    def has(self, id: str) -> bool:
        """Whether the run has such a figure, measured or not."""
        return id in self._figures

    def against(self, id: str) -> str:
        """What the figure is a ratio to; empty without the figure."""
        text: str = self._figures.get(id, {}).get("against", "")
        return text

    def missed(self, id: str) -> bool:
        """Whether the figure has a goal and does not reach it."""
        return self._figures.get(id, {}).get("met") is False

    def goal(self, id: str) -> str:
        """The goal as words, `missed` added where it is."""
        figure = self._figures.get(id, {})
        goal, value = figure.get("goal"), figure.get("value")
        if goal is None:
            return ""
        if value is None:
            return f"{goal:g}, not measured"
        lower_is_better = figure["met"] is (value < goal)
        return f"{'at most ' if lower_is_better else ''}{goal:g}{', missed' if figure['met'] is False else ''}"

    def number(self, id: str, digits: int = 2) -> str:
        """The median."""
        return written(self.value(id), digits)

    def span(self, id: str, digits: int = 2) -> str:
        """`min to max`."""
        figure = self._figures.get(id, {})
        low, high = (written(figure.get(end), digits) for end in ("min", "max"))
        return NOTHING if NOTHING in (low, high) else f"{low} to {high}"

    def rate(self, id: str) -> str:
        """The median with three digits, or whole from a thousand on."""
        value = self.value(id)
        if value is None:
            return NOTHING
        return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")

    @property
    def machine(self) -> str:
        """`2 cores of an Intel(R) Xeon(R) Processor; Python 3.11.7, ...`."""
        if "host" not in self.data:
            return "any machine: its figures are simulated"
        host = self.data["host"]
        versions = ", ".join(f"{name} {version}" for name, version in self.data.get("versions", {}).items())
        return f"{host.get('cores')} cores, {host.get('cpu')}; {versions}"


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a table of figures."""

    id: str
    words: str
    digits: int = 2


def written(value: float | None, digits: int) -> str:
    """A number with so many decimals."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def figures(lines: Sequence[Line], results: Results, earlier: Results | None = None) -> str:
    """A table of median, span and goal; with the medians of an other run where there is one."""
    heads = ["figure", "median", "min to max", "goal"] + (["other run"] if earlier else [])
    rows = []
    for line in lines:
        cells = [line.words, results.number(line.id, line.digits), results.span(line.id, line.digits)]
        cells.append(results.goal(line.id))
        rows.append([*cells, earlier.number(line.id, line.digits)] if earlier else cells)
    return table(heads, rows)
