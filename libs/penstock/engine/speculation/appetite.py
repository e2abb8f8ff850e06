"""How much guessing pays."""

from __future__ import annotations

from dataclasses import dataclass

_MEMORY = 0.75
"""Weight of the past in the moving average."""
_PROBE_EVERY = 16
"""Steps between trials when guesses are never right."""


@dataclass(slots=True)
class Appetite:
    """How many drafts one sequence wants: about one more than were right lately, none but for a trial now and then
    when none were. Every draft row costs computing, right or wrong.

    Affects speed only. Starts hopeful.
    """

    right: float = 4.0
    """Moving average of guesses that were right, per step; a step whose guesses were all right counts double."""
    idle: int = 0
    """Steps since the last draft."""

    def wanted(self, most: int) -> int:
        """How many drafts to ask for in the next step, at most `most`."""
        if self.right < 0.2 and self.idle < _PROBE_EVERY:
            self.idle += 1
            return 0
        return min(most, int(self.right) + 2)

    def learn(self, drafted: int, accepted: int) -> None:
        """What became of a step's drafts."""
        self.idle = 0
        worth = 2 * accepted if accepted == drafted else accepted
        self.right = _MEMORY * self.right + (1 - _MEMORY) * worth
