"""The arguments of a call as they are generated, given on as JSON text."""

from __future__ import annotations

import json
import re
from typing import ClassVar, Protocol

_STRUCTURE = re.compile(r'["\\{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class Arguments(Protocol):
    """Reads the arguments of one call. The text that `read` gives does not depend on where chunks end."""

    opening: ClassVar[str]
    """The character at which arguments begin."""
    done: bool
    """Whether their last character has come."""

    def read(self, text: str, at: int) -> tuple[str, int]:
        """The JSON text that `text` adds from position `at` on, and up to where it belongs to the arguments."""


class JsonArguments:
    """A JSON object, given on exactly as generated."""

    opening: ClassVar[str] = "{"

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def read(self, text: str, at: int) -> tuple[str, int]:
        """See `Arguments`."""
        begin = at
        if self._escaped:
            self._escaped = False
            at += 1
        while found := (_IN_STRING if self._quoted else _STRUCTURE).search(text, at):
            letter, at = found[0], found.end()
            if letter == '"':
                self._quoted = not self._quoted
            elif letter == "\\":
                self._escaped = at == len(text)
                at += 1
            else:
                self._depth += 1 if letter in "{[" else -1
                if self._depth == 0:
                    self.done = True
                    return text[begin:at], at
        return text[begin:], len(text)


def in_json_string(text: str) -> str:
    """`text` as it stands inside the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
