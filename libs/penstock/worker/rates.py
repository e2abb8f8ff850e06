"""How fast KV comes from the store, as the router should know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_REMEMBERED_BYTES = 256 << 20
"""Older transfers count ever less once this much has been moved since."""
_LEAST_BYTES = 64 << 10
"""Smaller transfers tell about the call, not about the way."""


@dataclass
class TransferRate:
    """A measured rate."""

    bytes_per_s: float = 0.0
    """0: never measured."""
    _bytes: float = 0.0
    _seconds: float = 0.0

    def moved(self, size: int, seconds: float) -> None:
        """A transfer has ended."""
        if size < _LEAST_BYTES or seconds <= 0:
            return
        kept = max(0.0, 1 - size / _REMEMBERED_BYTES)
        self._bytes = self._bytes * kept + size
        self._seconds = self._seconds * kept + seconds
        self.bytes_per_s = self._bytes / self._seconds


@dataclass
class FetchRates:
    """From the store of this host, and through it from those of others."""

    near: TransferRate = field(default_factory=TransferRate)
    far: TransferRate = field(default_factory=TransferRate)

    def fetched(self, tiers: Sequence[str], size: int, seconds: float) -> None:
        """Blocks of `size` bytes in all were fetched at once from `tiers`. Remote ones among them took the time."""
        remote = tiers.count("remote")
        if remote:
            self.far.moved(size * remote // len(tiers), seconds)
        else:
            self.near.moved(size, seconds)
