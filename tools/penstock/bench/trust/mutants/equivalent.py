"""Mutants that do what the unchanged code does, as somebody has found who looked at each: `equivalent.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.trust.mutants.mutant import Mutant

KNOWN = Path(__file__).with_name("equivalent.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class EquivalentMutant:
    """One entry."""

    path: str
    function: str
    before: str
    after: str
    why: str
    """It changes nothing."""

    def covers(self, mutant: Mutant) -> bool:
        """Whether this is the one."""
        return (self.path, self.function, self.before, self.after) == (
            mutant.path,
            mutant.function,
            mutant.before,
            mutant.after,
        )


def equivalents(path: Path = KNOWN) -> list[EquivalentMutant]:
    """All entries of a file. Raises TypeError for one that lacks a field or has another."""
    return [EquivalentMutant(**entry) for entry in tomllib.loads(path.read_text("utf-8")).get("mutant", ())]
