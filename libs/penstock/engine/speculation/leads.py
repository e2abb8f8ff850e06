"""What a model that drafts hears and says. Plain values, importable without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.engine.hooks import DraftTerms
from penstock.engine.rules import TextRules

SequenceId = tuple[int, int]
"""Of a stream, and of a sequence in it."""


@dataclass(frozen=True, slots=True)
class DraftTold:
    """How far a sequence is: its first `keep` tokens as they were told before, then `tokens`."""

    id: SequenceId
    number: int
    """Grows from one to the next."""
    keep: int
    tokens: Sequence[int]
    k: int
    """Tokens wanted beyond these."""
    terms: DraftTerms | None = None
    """With the first of a sequence."""
    ruled: bool = False
    """With the first of a sequence: rules will follow, and no token is guessed before."""


@dataclass(frozen=True, slots=True)
class DraftLead:
    """Guesses behind a sequence. Those with the same `after` follow each other without gaps."""

    id: SequenceId
    after: int
    """Number of what was told when these guesses began: they go on from its text."""
    length: int
    """Tokens of that text, and guesses handed out before these."""
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class DraftStep:
    """What one step has given."""

    leads: list[DraftLead] = field(default_factory=list)
    refused: list[SequenceId] = field(default_factory=list)
    """Sequences for which there are no more guesses, until there are."""
    worked: bool = False
    """Whether there was anything to compute; else the next step waits for news."""


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Statistics of one draft model. Counts are since the start."""

    sequences: int = 0
    free_pages: int = 0
    dropped: int = 0
    """Guesses of which the text went another way."""
    evicted: int = 0
    """Times that a sequence lost its KV to another."""
    refused: int = 0
    """Times that a sequence got no guesses for lack of room."""


class Foresight(Protocol):
    """Guesses ahead for many sequences. Synchronous; one thread at a time."""

    def begin(self) -> None:
        """Called first, in the thread that calls the rest."""
        ...

    def tell(self, told: DraftTold) -> None:
        """Takes in how far a sequence is; of one that it does not know nothing but the first."""
        ...

    def rule(self, id: SequenceId, rules: TextRules) -> None:
        """Here are the rules that were announced for the sequence."""
        ...

    def forget(self, id: SequenceId) -> None:
        """Frees everything kept for a sequence; does nothing for an unknown one."""
        ...

    def step(self) -> DraftStep:
        """Computes one step, for all sequences that want one."""
        ...

    def clear(self) -> None:
        """Forgets all sequences."""
        ...

    def stats(self) -> DraftStats:
        """Now."""
        ...
