"""What a proposer offers: tokens that may come next, and how likely each is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may come next. Says nothing when it is empty."""

    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    """Of each token: how likely it is right if those before it are."""

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.chances), "each token has a chance"

    def cut(self, length: int) -> Guess:
        """Its first `length` tokens."""
        return self if length >= len(self.tokens) else Guess(self.tokens[:length], self.chances[:length])

    @property
    def reach(self) -> tuple[float, ...]:
        """Of each token: how likely it is accepted, so that those before it are too. Never rises."""
        return tuple(accumulate(self.chances, mul))

    @property
    def hope(self) -> float:
        """Tokens of it that are accepted, on average."""
        return sum(self.reach)


NOTHING = Guess()


def right(tokens: Sequence[int], came: Sequence[int]) -> int:
    """How many leading tokens are those that came."""
    for place, (guessed, real) in enumerate(zip(tokens, came, strict=False)):
        if guessed != real:
            return place
    return min(len(tokens), len(came))
