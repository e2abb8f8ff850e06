"""How far what a proposer says of its guesses has been true lately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engine.speculation.guess import Guess, right

_MEMORY = 0.96
"""What a guessed token weighs after the next one of the same sequence."""
_PRIOR = 1.0
"""How many right tokens of a sequence its proposer's word is worth before anything was seen."""
_SURE = 0.98
"""No guess is believed more."""
_LONG_MEMORY = 0.999
_FIRST = 0.7
"""How likely a token of a drafter is right before any was seen."""


@dataclass(slots=True)
class Trust:
    """In one proposer, for one sequence: its chances are corrected by what came of them. Guesses are looked at whether
    they were verified or not, so a proposer that is not believed any more can be believed again."""

    right: float = 0.0
    """Guessed tokens that were right; old ones fade."""
    promised: float = 0.0
    """The sum of the chances that they were given."""

    @property
    def factor(self) -> float:
        """What came of a chance of 1."""
        return (self.right + _PRIOR) / (self.promised + _PRIOR)

    def corrected(self, guess: Guess) -> Guess:
        """The guess with the chances that are believed."""
        factor = self.factor
        return Guess(guess.tokens, tuple(min(_SURE, chance * factor) for chance in guess.chances))

    def learn(self, guess: Guess, came: Sequence[int]) -> None:
        """These tokens came where the guess begins. What lies behind its first wrong token, or behind what has come,
        says nothing."""
        hits = right(guess.tokens, came)
        seen = min(hits + 1, len(guess.tokens), len(came))
        for place in range(seen):
            self.promised = _MEMORY * self.promised + guess.chances[place]
            self.right = _MEMORY * self.right + (place < hits)


@dataclass(slots=True)
class Positions:
    """How often a drafter's tokens are right, by their position, over all sequences: for one that says nothing of it."""

    hits: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)
    """Tokens of each position behind right ones; old ones fade."""

    def chances(self, length: int) -> tuple[float, ...]:
        """Of `length` tokens, each if those before it are right. A position that was hardly seen is taken to be like
        the one before it."""
        chances: list[float] = []
        before = _FIRST
        for place in range(length):
            hits, seen = (self.hits[place], self.seen[place]) if place < len(self.seen) else (0.0, 0.0)
            before = (hits + 2 * before) / (seen + 2)
            chances.append(before)
        return tuple(chances)

    def learn(self, tokens: Sequence[int], came: Sequence[int], first: int = 0) -> None:
        """These tokens came where those of the drafter begin. The first `first` have been learned from before."""
        hits = right(tokens, came)
        for place in range(first, min(hits + 1, len(tokens), len(came))):
            while place >= len(self.seen):
                self.hits.append(0.0)
                self.seen.append(0.0)
            self.seen[place] = _LONG_MEMORY * self.seen[place] + 1
            self.hits[place] = _LONG_MEMORY * self.hits[place] + (place < hits)
