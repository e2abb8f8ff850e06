"""How far what a proposer says of its guesses has been true lately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engine.speculation.guess import Guess, right

_MEMORY = 0.96
"""What a guessed token weighs after the next one of the same sequence."""
_PRIOR = 1.0
"""How many right tokens of a sequence its proposer's word is worth before anything was seen."""
_SURE = 0.98
"""No guess is believed more."""
_OTHERS = 6.0
"""How many guessed tokens of a new sequence the experience with all others is worth."""
_LONG_MEMORY = 0.99
"""The same of a token of all sequences."""
_FIRST, _FIRST_WEIGHT = 0.7, 4.0
"""How likely a token of a drafter is right before any was seen, and how many seen ones that is worth."""


@dataclass(slots=True)
class Trust:
    """In one proposer, for one sequence: its chances are corrected by what came of them. Guesses are looked at whether
    they were verified or not, so a proposer that is not believed any more can be believed again."""

    right: float = 0.0
    """Guessed tokens that were right; old ones fade."""
    promised: float = 0.0
    """The sum of the chances that they were given."""

    def begun(self) -> Trust:
        """In the same proposer, for a new sequence: at first it is believed as far as this one."""
        promised = min(_OTHERS, self.promised)
        return Trust(promised * self.right / self.promised if self.promised else 0.0, promised)

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
            self._add(guess.chances[place], place < hits)

    def count(self, chance: float, right: int, wrong: int) -> None:
        """So many tokens with that chance were right, and so many were not."""
        for number in range(right + wrong):
            self._add(chance, number < right)

    def _add(self, chance: float, right: bool) -> None:
        self.promised = _MEMORY * self.promised + chance
        self.right = _MEMORY * self.right + right


@dataclass(slots=True)
class DraftRate:
    """How often a drafter's tokens are right behind right ones, over all sequences: it says nothing of that itself."""

    right: float = 0.0
    seen: float = 0.0
    """Tokens that have met the text; old ones fade."""

    @property
    def chance(self) -> float:
        """Of a token to be right if those before it are."""
        return (self.right + _FIRST * _FIRST_WEIGHT) / (self.seen + _FIRST_WEIGHT)

    def learn(self, right: int, wrong: int) -> None:
        """So many tokens were right, and so many were not."""
        fading = _LONG_MEMORY ** (right + wrong)
        self.right = fading * self.right + right
        self.seen = fading * self.seen + right + wrong
