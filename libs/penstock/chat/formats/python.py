"""Calls as Python writes them: `weather(city="Oslo", days=3)`; values may be written as in Python or as in JSON."""

from __future__ import annotations

from typing import ClassVar

from penstock.chat.formats.arguments import in_json_string
from penstock.chat.formats.pattern import SPACE

_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}
_MAX_WORD = 64


class PythonArguments:
    """Keyword arguments in parentheses, given on as a JSON object.

    What has no JSON form, such as a variable, is given on as it stands: the arguments are then no JSON, as generated.
    """

    opening: ClassVar[str] = "("

    def __init__(self) -> None:
        self.done = False
        self._closing: list[str] = []
        self._quote = ""
        self._escape = ""
        self._word = ""

    def read(self, text: str, at: int) -> tuple[str, int]:
        """See `Arguments`."""
        pieces: list[str] = []
        while at < len(text) and not self.done:
            pieces.append(self._in_string(text[at]) if self._quote else self._outside(text[at]))
            at += 1
        return "".join(pieces), at

    def _outside(self, letter: str) -> str:
        if letter.isalnum() or letter in "_+-.":
            self._word += letter
            return self._end_word() if len(self._word) == _MAX_WORD else ""
        if letter == "=" and len(self._closing) == 1:
            key, self._word = self._word, ""
            return f'"{key}": '
        return self._end_word() + self._punctuation(letter)

    def _end_word(self) -> str:
        word, self._word = self._word, ""
        return _WORDS.get(word, word)

    def _punctuation(self, letter: str) -> str:
        if letter in "\"'":
            self._quote = letter
            return '"'
        if letter in "([{":
            closing = "]" if letter == "[" or (letter == "(" and self._closing) else "}"
            self._closing.append(closing)
            return "[" if closing == "]" else "{"
        if letter in ")]}":
            closing = self._closing.pop()
            self.done = not self._closing
            return closing
        if letter in ",:":
            return letter + " "
        return "" if letter in SPACE else letter

    def _in_string(self, letter: str) -> str:
        if self._escape:
            return self._escaped(letter)
        if letter == "\\":
            self._escape = letter
            return ""
        if letter == self._quote:
            self._quote = ""
            return '"'
        return in_json_string(letter)

    def _escaped(self, letter: str) -> str:
        self._escape += letter
        code = _CODES.get(self._escape[1])
        if code is None:
            return self._unescaped(_ESCAPES.get(letter, letter if letter in "\\'\"" else self._escape))
        if len(self._escape) < 2 + code:
            return ""
        try:
            meant = chr(int(self._escape[2:], 16))
        except (ValueError, OverflowError):
            return self._unescaped(self._escape)
        if "\ud800" <= meant <= "\udfff":
            self._escape = ""
            return f"\\u{ord(meant):04x}"  # half of a pair is no text
        if meant.isprintable() or len(self._escape) != 6:
            return self._unescaped(meant)
        escape, self._escape = self._escape, ""
        return escape  # half of a pair, maybe: JSON writes it the same way

    def _unescaped(self, text: str) -> str:
        self._escape = ""
        return in_json_string(text)
