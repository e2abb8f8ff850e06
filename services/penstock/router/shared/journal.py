"""How far one reader is in another router's log: what is new, what came twice, and what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["apply", "skip", "gap"]


@dataclass(slots=True)
class Journal:
    """A position. Entries are numbered from 1 within an epoch, and an epoch begins with a snapshot."""

    epoch: int
    number: int
    """Of the last entry that was applied, or is in the snapshot."""
    last_id: bytes = b"0"
    """Of the last entry that was read."""

    def judge(self, epoch: int, number: int) -> Verdict:
        """apply: it is the next one. skip: it is in the snapshot, came twice, or was written by an owner that had lost
        its lease. gap: something before it is missing, and only a new snapshot helps."""
        if epoch < self.epoch or (epoch == self.epoch and number <= self.number):
            return "skip"
        if epoch == self.epoch and number == self.number + 1:
            self.number = number
            return "apply"
        return "gap"
