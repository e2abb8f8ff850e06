"""What the two forms of a corpus have in common."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from penstock.engine.speculation.guess import Guess


class Corpus(Protocol):
    """The last tokens of texts, and where each of their grams (1, 2, 4, 8 or 16 consecutive tokens) stands."""

    def append(self, tokens: array[int]) -> None:
        """Appends tokens (of typecode i), and BREAK between texts; the oldest ones go. O(tokens)."""
        ...


class Corpora(Protocol):
    """Makes corpora, all of one form, and guesses from them."""

    def new(self, limit: int) -> Any:
        """An empty corpus of at most `limit` tokens, a power of two from 512 on."""
        ...

    def guess(self, own: Any, others: tuple[Any, Any], after: Sequence[int], most: int) -> Guess:
        """What comes behind the last text of `own` and then `after`, from what `own` and the others, where they are not
        None, say. At most `most` tokens. No other thread may append to one of them meanwhile."""
        ...
