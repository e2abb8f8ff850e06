"""The speed of transfers from the store, which the router takes into account."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_REMEMBERED_BYTES = 256 << 20
"""Bytes over which the rate is averaged; older transfers fade out."""
_LEAST_BYTES = 64 << 10
"""Smallest transfer, in bytes, to measure; the time of smaller ones is mostly that of the call."""


@dataclass
class TransferRate:
    """A measured rate."""

    bytes_per_s: float = 0.0
    """0: never measured."""
    _bytes: float = 0.0
    _seconds: float = 0.0

    def moved(self, size: int, seconds: float) -> None:
        """Takes in a transfer that has ended."""
        if size < _LEAST_BYTES or seconds <= 0:
            return
        kept = max(0.0, 1 - size / _REMEMBERED_BYTES)
        self._bytes = self._bytes * kept + size
        self._seconds = self._seconds * kept + seconds
        self.bytes_per_s = self._bytes / self._seconds


@dataclass
class FetchRates:
    """The rates from the store of this host, and through it from the stores of other hosts."""

    near: TransferRate = field(default_factory=TransferRate)
    far: TransferRate = field(default_factory=TransferRate)

    def fetched(self, tiers: Sequence[str], size: int, seconds: float) -> None:
        """Takes in one fetch of `size` bytes from `tiers`. Remote blocks, if any, account for all of its time."""
        remote = tiers.count("remote")
        if remote:
            self.far.moved(size * remote // len(tiers), seconds)
        else:
            self.near.moved(size, seconds)
