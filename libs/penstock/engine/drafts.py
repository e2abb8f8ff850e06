"""What was drafted, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

GRAMMAR, LOOKUP, MODEL = "grammar", "lookup", "model"
"""The proposers: tokens that a grammar forces, what followed the same words earlier, and a draft model."""


@dataclass(slots=True)
class DraftAccount:
    """Drafts that were verified, and those of them that were accepted."""

    verified: dict[str, int] = field(default_factory=dict)
    """By proposer."""
    right: dict[str, int] = field(default_factory=dict)
    """By proposer."""

    @property
    def drafted(self) -> int:
        """All that were verified."""
        return sum(self.verified.values())

    @property
    def accepted(self) -> int:
        """All of them that were right."""
        return sum(self.right.values())

    def copy(self) -> DraftAccount:
        """As it is now."""
        return DraftAccount(dict(self.verified), dict(self.right))

    def add(self, proposer: str, drafted: int, accepted: int) -> None:
        """A step verified `drafted` drafts of the proposer and accepted `accepted` of them."""
        self.verified[proposer] = self.verified.get(proposer, 0) + drafted
        self.right[proposer] = self.right.get(proposer, 0) + accepted
