"""What a drafter has saved and what it has cost, in seconds: it is asked as long as it has something left."""

from __future__ import annotations

from math import inf

_SHARE = 0.02
"""Of the decoding time, what a drafter may cost that brings nothing."""
_MOST_STEPS = 6.0
"""Steps without drafts whose seconds it can have left at most. So a drafter that becomes useless costs no more."""


class Balance:
    """One for all sequences. Whatever is estimated of a drafter, it costs no more than its share and what is left:
    seconds are those that were measured."""

    def __init__(self) -> None:
        self._left_s = inf
        self.open = True
        """Whether the drafter may be asked. Once nothing is left, not before it has as much again as it can have."""

    def pay(self, seconds: float) -> None:
        """It has cost so many seconds; less than none: it has saved some."""
        self._left_s -= seconds
        self.open = self.open and self._left_s > 0

    def step(self, plain_s: float) -> None:
        """A step is over that takes so long without drafts."""
        most_s = _MOST_STEPS * plain_s
        self._left_s = min(most_s, self._left_s + _SHARE * plain_s)
        self.open = self._left_s > 0 if self.open else self._left_s >= most_s
