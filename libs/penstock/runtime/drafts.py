"""What was drafted, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

GRAMMAR, LOOKUP, MODEL, HEAD = PROPOSERS = ("grammar", "lookup", "model", "head")
"""Tokens that a grammar forces, what followed the same words earlier, a draft model, and a draft head."""


def proposer_number(name: str) -> int:
    """How the wire names a proposer; 0: nobody, whose name is empty."""
    return PROPOSERS.index(name) + 1 if name else 0


def proposer_name(number: int) -> str:
    """The proposer of that number; empty: nobody, or one that is not known here."""
    return PROPOSERS[number - 1] if 0 < number <= len(PROPOSERS) else ""


def by_proposer(counts: Iterable[int]) -> dict[str, int]:
    """Counts in the order of `PROPOSERS`, by their names."""
    return dict(zip(PROPOSERS, counts, strict=False))


def _none() -> list[int]:
    return [0] * len(PROPOSERS)


@dataclass(slots=True)
class DraftAccount:
    """Drafts that were verified, and those of them that were accepted."""

    passes: int = 0
    """Steps that verified any."""
    verified: list[int] = field(default_factory=_none)
    """In the order of `PROPOSERS`, as is `right`."""
    right: list[int] = field(default_factory=_none)
    verified_at: list[int] = field(default_factory=list)
    """By place among the drafts of a pass, as is `right_at`: the first one of each, the second one, and so on."""
    right_at: list[int] = field(default_factory=list)
    waited_s: float = 0.0
    """Seconds for which steps waited for a draft model."""

    @property
    def any(self) -> bool:
        """Whether anything was drafted or waited for."""
        return self.passes > 0 or self.waited_s > 0

    @property
    def drafted(self) -> int:
        """All that were verified."""
        return sum(self.verified)

    @property
    def accepted(self) -> int:
        """All of them that were right."""
        return sum(self.right)

    def copy(self) -> DraftAccount:
        """As it is now."""
        copy = DraftAccount()
        copy.add(self)
        return copy

    def add(self, other: DraftAccount) -> None:
        """The other account's are counted here too."""
        self.passes += other.passes
        self.waited_s += other.waited_s
        for own, more in (
            (self.verified, other.verified),
            (self.right, other.right),
            (self.verified_at, other.verified_at),
            (self.right_at, other.right_at),
        ):
            _add(own, more)

    def count(self, proposers: Sequence[tuple[str, int]], accepted: int) -> None:
        """A pass verified so many drafts of each of these proposers, one behind the other, and accepted the first
        `accepted` of them all."""
        self.passes += 1
        drafted, left = 0, accepted
        for proposer, drafts in proposers:
            number = PROPOSERS.index(proposer)
            self.verified[number] += drafts
            self.right[number] += min(drafts, left)
            drafted, left = drafted + drafts, max(0, left - drafts)
        _add(self.verified_at, (1 for _ in range(drafted)))
        _add(self.right_at, (place < accepted for place in range(drafted)))


def _add(own: list[int], more: Iterable[int]) -> None:
    for place, count in enumerate(more):
        if place < len(own):
            own[place] += count
        else:
            own.append(int(count))
