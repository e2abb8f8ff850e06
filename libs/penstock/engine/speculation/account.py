"""What was drafted for one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

GRAMMAR, LOOKUP, MODEL = "grammar", "lookup", "model"
"""The proposers: tokens that a grammar forces, what followed the same words earlier, and a draft model."""


@dataclass(slots=True)
class DraftCount:
    """Of one proposer."""

    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class DraftAccount:
    """Drafts that were verified, and those of them that were accepted."""

    by_proposer: dict[str, DraftCount] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0

    def add(self, proposer: str, drafted: int, accepted: int) -> None:
        """A step verified `drafted` drafts of the proposer and accepted `accepted` of them."""
        count = self.by_proposer.setdefault(proposer, DraftCount())
        count.drafted += drafted
        count.accepted += accepted
        self.drafted += drafted
        self.accepted += accepted
