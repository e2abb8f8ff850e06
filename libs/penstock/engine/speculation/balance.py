"""What a drafter has saved and what it has cost, in seconds: it is asked as long as it has something left."""

from __future__ import annotations

from math import inf

_SHARE = 0.015
"""Of the decoding time, what a drafter may cost that brings nothing."""
_GIVEN_STEPS, _EARNED_STEPS = 12.0, 48.0
"""Steps without drafts whose seconds it can have left at most, of that share and of what it has saved. With the first
it has to come through until its first drafts are there; with the second, through times in which it is wrong."""


class Balance:
    """One for all sequences. Whatever is estimated of a drafter, it costs no more than its share and what it has saved:
    seconds are those that were measured."""

    def __init__(self) -> None:
        self._left_s = inf
        self.open = True
        """Whether the drafter may be asked. Once nothing is left, not before it has as much again as it is given."""

    def pay(self, seconds: float) -> None:
        """It has cost so many seconds; less than none: it has saved some."""
        self._left_s -= seconds
        self.open = self.open and self._left_s > 0

    def step(self, plain_s: float) -> None:
        """A step is over that takes so long without drafts."""
        given_s = _GIVEN_STEPS * plain_s
        if self._left_s == inf:
            self._left_s = given_s
        elif self._left_s < given_s:
            self._left_s = min(given_s, self._left_s + _SHARE * plain_s)
        else:
            self._left_s = min(self._left_s, _EARNED_STEPS * plain_s)
        self.open = self._left_s > 0 if self.open else self._left_s >= given_s
