"""What transfers from the store cost, which the router takes into account."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_KEPT = 1 - 1 / 64
"""How much each transfer leaves of the weight of those before it."""
_EVEN_BYTES = 1 << 20
"""The time of smaller transfers is mostly that of the call, whose noise does not grow with them; that of larger ones
grows with their size, and so does its noise."""
_LEAST_S = 1e-7
"""What takes less moved nothing, or its clock stood still."""
_LEAST_SPREAD = 0.05
"""Of sizes, as a part of their mean: with less there is no telling the bytes from the call."""


@dataclass
class TransferCost:
    """Of one way: a line through the seconds of its transfers over their bytes, of which older ones fade (weighted
    least squares, so that each counts by how far it is off in proportion)."""

    overhead_s: float = 0.0
    """Seconds of any transfer, however small. 0: not known apart from the bytes."""
    bytes_per_s: float = 0.0
    """Of the rest. 0: never measured."""
    _sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """Weights, and weighted: bytes, bytes squared, seconds, bytes times seconds."""

    def moved(self, size: int, seconds: float) -> None:
        """Takes in a transfer that has ended."""
        if size <= 0 or seconds < _LEAST_S:
            return
        weight = 1 / (size + _EVEN_BYTES) ** 2
        new = (weight, weight * size, weight * size * size, weight * seconds, weight * size * seconds)
        self._sums = tuple(_KEPT * before + more for before, more in zip(self._sums, new, strict=True))
        weights, sizes, squares, times, products = self._sums
        size_mean, time_mean = sizes / weights, times / weights
        spread = squares / weights - size_mean**2
        if spread > (_LEAST_SPREAD * size_mean) ** 2:
            slope = (products / weights - size_mean * time_mean) / spread
            self.overhead_s = min(max(0.0, time_mean - slope * size_mean), time_mean)
        rest_s = time_mean - min(self.overhead_s, 0.9 * time_mean)
        self.bytes_per_s = size_mean / rest_s


@dataclass
class FetchRates:
    """Of the way to the store of this host, and of that through it to the stores of other hosts. Bytes are those of
    whole blocks, also where the far part alone was moved (see penstock.kv.parts): whoever predicts a fetch counts whole
    blocks too."""

    near: TransferCost = field(default_factory=TransferCost)
    far: TransferCost = field(default_factory=TransferCost)

    def fetched(self, tiers: Sequence[str], size: int, seconds: float) -> None:
        """Takes in one fetch of `size` bytes, whose blocks came from `tiers`. Remote blocks, if any, account for all of
        its time."""
        remote = tiers.count("remote")
        if remote:
            self.far.moved(size * remote // len(tiers), seconds)
        else:
            self.near.moved(size, seconds)
