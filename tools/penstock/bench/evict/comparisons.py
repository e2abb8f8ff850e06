"""Policies compared: replays of one trace with the same room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

HINTED = "worth, hints"
"""The policy `worth` when clients say when they return."""

_IN_RANGE = (0.3, 0.9)
_LEAST_S = 1e-9

Row = dict[str, Any]
"""One line of `python -m penstock.bench.evict`."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The seconds that each policy saved, on one trace with the same room."""

    trace: str
    overlay: bool
    """Whether sessions were moved so that they run at the same time."""
    capacities: tuple[int, ...]
    rows: dict[str, Row]

    def ratio(self, policy: str, to: str) -> float:
        """Seconds saved under one policy, as a multiple of those under another."""
        ours, other = (max(_LEAST_S, float(self.rows[name]["seconds_saved"])) for name in (policy, to))
        return ours / other

    @property
    def reach(self) -> float:
        """The share of the offline optimum that LRU saves."""
        return self.ratio("lru", "offline")

    @property
    def counts(self) -> bool:
        """LRU is neither hopeless here nor good enough."""
        return _IN_RANGE[0] <= self.reach <= _IN_RANGE[1]


def comparisons(heads: Sequence[Row], rows: Iterable[Row]) -> list[Comparison]:
    """All of them, in the order of the traces' heads, then by room."""
    about = {head["trace"]: (at, head["overlay"]) for at, head in enumerate(heads)}
    places: dict[tuple[str, tuple[int, ...]], Comparison] = {}
    for row in rows:
        name, capacities = row["trace"], tuple(row["capacities"])
        place = places.setdefault((name, capacities), Comparison(name, about[name][1], capacities, {}))
        place.rows[row["policy"]] = row
    return sorted(places.values(), key=lambda one: (about[one.trace], len(one.capacities), one.capacities))
