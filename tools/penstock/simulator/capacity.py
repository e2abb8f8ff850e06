"""How many workers a workload needs, and in which roles: the fewest at which enough requests meet their targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.simulator.simulation import Served, SimulatedMesh, SimulationResult

_ALL = 8
"""So few splits of a number of workers are all tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Targets of a request, in seconds; 0: any."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    """Between tokens, in the mean of the answer."""

    def met(self, one: Served) -> bool:
        """Whether a request was served within them."""
        ttft, itl = self.ttft_s, self.itl_s
        return not one.refused and (not ttft or one.ttft_s <= ttft) and (not itl or one.itl_s <= itl)

    def share(self, result: SimulationResult) -> float:
        """The part of all requests that was."""
        return sum(map(self.met, result.requests)) / max(1, len(result.requests))


@dataclass(frozen=True, slots=True)
class Tried:
    """One mesh of a search."""

    mesh: SimulatedMesh
    good: float
    """The part of the requests that met their targets."""

    @property
    def workers(self) -> int:
        """All of them."""
        return self.mesh.prefill + self.mesh.decode + self.mesh.both


class CapacitySearch:
    """Finds the cheapest split. Each mesh is simulated once."""

    def __init__(
        self,
        mesh: SimulatedMesh,
        good: float,
        share: Callable[[SimulatedMesh], float],
        most: int,
        *,
        least: tuple[int, int] | None = None,
    ) -> None:
        """`mesh`: all but the numbers of workers; `good`: the part of the requests that shall meet their targets;
        `share`: simulates a mesh and returns that part; `most`: workers at most; `least`: prefill and decode workers
        that a split has at least, where none of both roles are wanted."""
        self._mesh = mesh
        self._good = good
        self._share = share
        self._most = most
        self._least = least
        self._tried: dict[tuple[int, int, int], Tried] = {}

    @property
    def tried(self) -> list[Tried]:
        """All that was simulated, in order."""
        return [*self._tried.values()]

    def run(self) -> Tried | None:
        """The smallest mesh that is good enough, of these the best; None if even the largest is not.

        Takes for granted that more workers are no worse, and that of one number of workers the best split has no
        worse ones between it and those that are worse than it: both hold but for noise.
        """
        least = enough = sum(self._least) if self._least else 1
        while (found := self._best(enough)).good < self._good:
            if enough == self._most:
                return None
            enough = min(2 * enough, self._most)
        low = enough // 2 + 1 if enough > least else least
        while low < enough:
            middle = (low + enough) // 2
            best = self._best(middle)
            if best.good >= self._good:
                enough, found = middle, best
            else:
                low = middle + 1
        return found

    def _best(self, workers: int) -> Tried:
        """Of all splits of so many workers, the one for all among them."""
        together = [] if self._least else [self._try(0, 0, workers)]
        if workers < 2:
            return together[0]
        fewest, others = self._least or (1, 1)
        low, high = fewest, workers - others
        while high - low >= _ALL:
            left = low + (high - low) // 3
            right = high - (high - low) // 3
            if self._try(left, workers - left, 0).good < self._try(right, workers - right, 0).good:
                low = left + 1
            else:
                high = right - 1 if self._good_at(left, workers) > self._good_at(right, workers) else right
        apart = [self._try(prefill, workers - prefill, 0) for prefill in range(low, high + 1)]
        return max([*together, *apart], key=lambda one: one.good)

    def _good_at(self, prefill: int, workers: int) -> float:
        return self._try(prefill, workers - prefill, 0).good

    def _try(self, prefill: int, decode: int, both: int) -> Tried:
        key = (prefill, decode, both)
        if key not in self._tried:
            mesh = replace(self._mesh, prefill=prefill, decode=decode, both=both)
            self._tried[key] = Tried(mesh, self._share(mesh))
        return self._tried[key]
