"""How much may be written. Pure: the caller brings the clock."""

from __future__ import annotations

from dataclasses import dataclass

_BURST_S = 1.0
DAY_S = 86_400


@dataclass(slots=True)
class WriteBudget:
    """A bucket that fills at `per_s` bytes per second, and an allowance of `per_day` for each day of 24 hours UTC.

    Both protect the drive. The second is written down by the owner, so that a restart does not grant it again.
    """

    per_s: int
    per_day: int
    day: int = 0
    """Days since 1970 that `spent` belongs to."""
    spent: int = 0
    """Bytes written on that day."""
    _level: float = 0.0
    _at: float = 0.0

    def __post_init__(self) -> None:
        self._level = self.per_s * _BURST_S

    def wait_s(self, size: int, now: float, wall: float) -> float:
        """0: `size` bytes may be written now. Else how long to wait at least. `wall` is the time since 1970."""
        self._turn(wall)
        if self.spent + size > self.per_day:
            return (self.day + 1) * DAY_S - wall
        burst = max(self.per_s * _BURST_S, float(size))
        self._level = min(burst, self._level + max(0.0, now - self._at) * self.per_s)
        self._at = now
        return max(0.0, (size - self._level) / self.per_s)

    def spend(self, size: int, wall: float) -> None:
        """`size` bytes were written."""
        self._turn(wall)
        self._level -= size
        self.spent += size

    def _turn(self, wall: float) -> None:
        day = int(wall // DAY_S)
        if day != self.day:
            self.day, self.spent = day, 0
