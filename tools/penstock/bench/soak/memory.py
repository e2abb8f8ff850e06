"""How the memory of processes grows: those that live long enough show it."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.bench.soak.faults import kind_of
from penstock.bench.soak.mesh import SoakMesh
from penstock.bench.soak.system import private_bytes

_PERIOD_S = 1.0
_LEAST_S = 60.0
"""The later half of a life, at least: young processes fill their pools and buffers."""

Sample = tuple[float, float]
"""Seconds and bytes."""


@dataclass(slots=True)
class MemoryLog:
    """Private memory of each process over its life."""

    lives: dict[tuple[str, int], list[Sample]] = field(default_factory=dict)
    """By service and pid."""

    async def watch(self, mesh: SoakMesh) -> None:
        """Looks at all processes until it is cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            for name, pid in mesh.pids().items():
                try:
                    size = private_bytes(pid)
                except OSError:
                    continue  # it has just ended
                self.lives.setdefault((name, pid), []).append((clock(), size))
            await asyncio.sleep(_PERIOD_S)

    def growth(self) -> dict[str, float]:
        """Bytes by which the longest-lived process of each kind grows in the later half of its life, in which what it
        may fill is full; by kind. Kinds whose processes were all short-lived are left out."""
        longest: dict[str, Sequence[Sample]] = {}
        for kind, life in self._late():
            if span(life) >= max(_LEAST_S, span(longest.get(kind, ()))):
                longest[kind] = life
        return {kind: slope(life) * span(life) for kind, life in sorted(longest.items())}

    def _late(self) -> Iterator[tuple[str, Sequence[Sample]]]:
        for (name, _), life in self.lives.items():
            yield kind_of(name), life[len(life) // 2 :]


def span(life: Sequence[Sample]) -> float:
    """Seconds from its first sample to its last."""
    return life[-1][0] - life[0][0] if life else 0.0


def slope(life: Sequence[Sample]) -> float:
    """Bytes a second, by least squares; 0 where the samples are of one moment."""
    if span(life) <= 0:
        return 0.0
    return statistics.linear_regression([at for at, _ in life], [size for _, size in life]).slope
