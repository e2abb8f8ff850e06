"""Whether the disk can be used. Pure: the caller brings the clock.

A disk that fails, or is full, read-only or too slow, is left alone for a while, longer each time, and tried again.
Reading and writing are judged apart: a full disk can be read.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_S = 1.0
_LONGEST_S = 60.0


@dataclass(slots=True)
class Health:
    """Of one direction."""

    failures: int = 0
    """Over all."""
    reason: str = ""
    """Why it is off; empty: it is on."""
    _until: float = 0.0
    _pause: float = _FIRST_S

    def usable(self, now: float) -> bool:
        """Whether to try."""
        return now >= self._until

    @property
    def until(self) -> float:
        """When to try again."""
        return self._until

    def failed(self, reason: str, now: float) -> bool:
        """An attempt failed. True: for a reason that has not been logged yet."""
        news = reason != self.reason
        self.failures += 1
        self.reason = reason
        if not self.usable(now):  # one of several that were under way: the disk failed once
            return news
        self._until = now + self._pause
        self._pause = min(_LONGEST_S, self._pause * 2)
        return news

    def worked(self) -> bool:
        """It worked. True: it had been off."""
        news = bool(self.reason)
        self.reason, self._until, self._pause = "", 0.0, _FIRST_S
        return news
