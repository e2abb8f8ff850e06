"""Text of which it is known what has to come next: what stands before, between and after the arguments of calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from enum import Enum

SPACE = " \t\r\n"


class Slot(Enum):
    """A part of a pattern whose text is not known beforehand."""

    STRING = "a JSON string: the name of a function"
    NAME = "the bare name of a function"
    ID = "the id of a call, or a part of it"
    SKIPPED = "a JSON string that means nothing"


Piece = str | Slot
Pattern = tuple[Piece, ...]
"""Pieces in order; white space may stand in front of each of them, and at the end."""

_QUOTED = (Slot.STRING, Slot.SKIPPED)


class Expected:
    """Compares text with one pattern, character by character."""

    def __init__(self, pattern: Pattern) -> None:
        self._pattern = pattern
        self._piece = 0
        self._offset = 0
        self._escaped = False
        self._texts: dict[Slot, str] = {}

    @property
    def complete(self) -> bool:
        """Whether all pieces have come."""
        at = self._piece
        if at == len(self._pattern):
            return True
        return at == len(self._pattern) - 1 and self._bare(self._pattern[at]) and self._offset > 0

    @property
    def name(self) -> str:
        """The function's name; empty when there is none, or none that is valid."""
        quoted = self._texts.get(Slot.STRING)
        if quoted is None:
            return self._texts.get(Slot.NAME, "")
        try:
            return str(json.loads(quoted))
        except ValueError:
            return ""

    @property
    def id(self) -> str:
        """What stands in the place of the call's id."""
        return self._texts.get(Slot.ID, "")

    def take(self, letter: str) -> bool:
        """Whether `letter` may come next; then it counts as seen."""
        if self._piece == len(self._pattern):
            return letter in SPACE
        piece = self._pattern[self._piece]
        if isinstance(piece, Slot) and self._bare(piece) and self._offset > 0 and not _in_name(letter):
            self._end_piece()
            return self.take(letter)
        if self._offset == 0 and letter in SPACE:
            return True
        if isinstance(piece, Slot):
            return self._take_in_slot(piece, letter)
        if letter != piece[self._offset]:
            return False
        self._offset += 1
        if self._offset == len(piece):
            self._end_piece()
        return True

    @staticmethod
    def _bare(piece: Piece) -> bool:
        return isinstance(piece, Slot) and piece not in _QUOTED

    def _take_in_slot(self, slot: Slot, letter: str) -> bool:
        if self._offset == 0 and (letter != '"' if slot in _QUOTED else not _in_name(letter)):
            return False
        self._texts[slot] = self._texts.get(slot, "") + letter
        self._offset += 1
        if slot not in _QUOTED:
            return True
        if self._escaped:
            self._escaped = False
        elif letter == "\\":
            self._escaped = True
        elif letter == '"' and self._offset > 1:
            self._end_piece()
        return True

    def _end_piece(self) -> None:
        self._piece, self._offset = self._piece + 1, 0


class Alternatives:
    """Several patterns at once: those that the text may still be."""

    def __init__(self, patterns: Collection[Pattern]) -> None:
        self._alive = [Expected(pattern) for pattern in patterns]

    def complete(self, good: Callable[[Expected], bool] = lambda expected: True) -> Expected | None:
        """A pattern that has come completely, and that is `good`."""
        return next((one for one in self._alive if one.complete and good(one)), None)

    def take(self, letter: str) -> bool:
        """Whether `letter` may come next in any pattern; the others are given up."""
        self._alive = [one for one in self._alive if one.take(letter)]
        return bool(self._alive)


def _in_name(letter: str) -> bool:
    return letter.isalnum() or letter in "_-."
