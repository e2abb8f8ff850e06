"""How many drafts one sequence is worth."""

from __future__ import annotations

from dataclasses import dataclass

_MEMORY = 0.75
"""Weight of the past in the moving average."""
_PROBE_EVERY = 16
"""Steps between trials when guesses are never right."""


@dataclass(slots=True)
class Appetite:
    """Decides how many drafts to ask for one sequence: about one more than were right lately. When all were wrong, it
    asks only for an occasional trial. Every draft costs computing time, right or wrong.

    Affects speed only. Starts hopeful.
    """

    right: float = 4.0
    """Moving average of guesses that were right, per step; a step whose guesses were all right counts double."""
    idle: int = 0
    """Steps since the last draft."""
    drafted: int = 0
    """Drafts that were verified so far."""
    accepted: int = 0
    """Those of them that were right."""

    def wanted(self, most: int) -> int:
        """How many drafts to ask for in the next step, at most `most`."""
        if self.right < 0.2 and self.idle < _PROBE_EVERY:
            self.idle += 1
            return 0
        return min(most, int(self.right) + 2)

    def learn(self, drafted: int, accepted: int, free: int = 0) -> None:
        """A step verified `drafted` drafts and accepted the first `accepted` of them. The first `free` ones were no
        guesses: they say nothing of the drafter."""
        self.drafted += drafted
        self.accepted += accepted
        drafted, accepted = drafted - free, max(0, accepted - free)
        if free and not drafted:
            return
        self.idle = 0
        worth = 2 * accepted if accepted == drafted else accepted
        self.right = _MEMORY * self.right + (1 - _MEMORY) * worth
