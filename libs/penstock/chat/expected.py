"""Text of which it is known what has to come next."""

from __future__ import annotations

from collections.abc import Sequence

SPACE = " \t\r\n"


class Expected:
    """Compares text with a sequence of pieces, character by character; any white space may stand between two pieces."""

    def __init__(self, pieces: Sequence[str | None]) -> None:
        """A piece is a text, or None for a JSON string."""
        self._pieces = pieces
        self._piece = 0
        self._offset = 0
        self._escaped = False
        self.string = ""
        """The JSON string, as it was written."""

    @property
    def complete(self) -> bool:
        """Whether all pieces have come."""
        return self._piece == len(self._pieces)

    def take(self, letter: str) -> bool:
        """Whether `letter` may come next; then it counts as seen."""
        if self._offset == 0 and letter in SPACE:
            return True
        if self.complete:
            return False
        expected = self._pieces[self._piece]
        if expected is None:
            return self._take_in_string(letter)
        if letter != expected[self._offset]:
            return False
        self._offset += 1
        if self._offset == len(expected):
            self._end_piece()
        return True

    def _take_in_string(self, letter: str) -> bool:
        if self._offset == 0 and letter != '"':
            return False
        self.string += letter
        self._offset += 1
        if self._escaped:
            self._escaped = False
        elif letter == "\\":
            self._escaped = True
        elif letter == '"' and self._offset > 1:
            self._end_piece()
        return True

    def _end_piece(self) -> None:
        self._piece, self._offset = self._piece + 1, 0
