"""What the text of one request keeps to. Plain, importable without torch and numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.engine.bans import WordBans
    from penstock.grammar.guide import Guide


@dataclass(frozen=True, slots=True)
class TextRules:
    """Its grammar, and words that must not be there."""

    guide: Guide | None = None
    """Its way through its grammar."""
    words: WordBans | None = None
    """What its bad words ban."""


FREE = TextRules()
