"""The figures of an evaluation, their goals, and their table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from .judging import Tally

GOALS: Mapping[str, float] = MappingProxyType(
    {
        "tool_exact": 0.9,
        "tool_name": 0.95,
        "value_exact": 0.93,
        "json_valid": 0.6,
        "asks_back": 0.8,
        "declines": 0.8,
        "tool_exact_constrained": 0.92,
        "json_valid_constrained": 1.0,
        "json_exact_constrained": 0.8,
        "accept_tool_calls": 0.85,
        "accept_answers": 0.9,
    }
)
"""Fractions to reach."""
_SPREAD = 0.1
"""By how much the worst kind may lie below the mean."""
_CONSTRAINED = "_constrained"

Figure = dict[str, Any]


def fractions(tally: Tally, *, constrained: bool = False) -> list[Figure]:
    """Of everything that was counted; freely written, or in the column with constrained decoding."""
    suffix = _CONSTRAINED if constrained else ""
    return [fraction(name + suffix, tally.right[name], tally.total[name]) for name in sorted(tally.total)]


def fraction(name: str, right: int, total: int) -> Figure:
    """A share of right cases, with its interval, beside its goal."""
    low, high = _interval(right, total)
    goal = GOALS.get(name)
    met = None if goal is None else right / total >= goal
    return figure(name, right / total, "fraction", low=low, high=high, against=f"{total} cases", goal=goal, met=met)


def spread(tally: Tally, kinds: Sequence[str]) -> list[Figure]:
    """The mean of the kinds' shares of exact calls, each kind counting the same, less the worst kind's."""
    names = [name for kind in kinds if tally.total[name := f"tool_exact_{kind}"]]
    if not names:
        return []
    shares = {name: tally.right[name] / tally.total[name] for name in names}
    worst = min(shares, key=lambda name: shares[name])
    below = sum(shares.values()) / len(shares) - shares[worst]
    return [figure("kind_spread", below, "fraction", against=worst, goal=_SPREAD, met=below <= _SPREAD)]


def figure(
    name: str,
    value: float,
    unit: str,
    *,
    low: float | None = None,
    high: float | None = None,
    against: str | None = None,
    goal: float | None = None,
    met: bool | None = None,
) -> Figure:
    """One figure of the report."""
    rounded = [None if x is None else round(x, 4) for x in (value, low, high)]
    return {
        "id": name,
        "value": rounded[0],
        "unit": unit,
        "min": rounded[1],
        "max": rounded[2],
        "against": against,
        "goal": goal,
        "met": met,
    }


def _interval(right: float, total: int) -> tuple[float, float]:
    """Wilson's 95% interval of a fraction."""
    z, share = 1.96, right / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return max(0.0, middle - half), min(1.0, middle + half)


def table(report: Mapping[str, Any]) -> str:
    """A row for each figure; those that were measured with constrained decoding as well have a second column."""
    figures = {found["id"]: found for found in report["figures"]}
    rows = [f"{'':22} {'free':46} constrained"] if any(map(_is_constrained, figures)) else []
    for name, found in figures.items():
        if not _is_constrained(name):
            beside = figures.get(name + _CONSTRAINED)
            rows.append(f"{name:22} {_cell(found):46} {_cell(beside) if beside else ''}".rstrip())
    return "\n".join(rows)


def _is_constrained(name: str) -> bool:
    return name.endswith(_CONSTRAINED)


def _cell(found: Figure) -> str:
    unit = f"[{found['min']}, {found['max']}]" if found["unit"] == "fraction" and found["min"] is not None else ""
    unit = unit or found["unit"].removeprefix("fraction")
    goal = "" if found["goal"] is None else f"goal {found['goal']}: {'met' if found['met'] else 'not met'}"
    return f"{found['value']:>8} {unit:16} {goal}".rstrip()
