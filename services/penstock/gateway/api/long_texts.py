"""Long strings of a JSON text, decoded in slices.

A decoder makes a string in one go and keeps Python's global lock meanwhile: megabytes of Chinese or emoji would stop
every other client's stream. So long strings are taken out of the text before it is decoded, each with a name in its
place; they are decoded slice by slice, between which other threads run, and put where their names are.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

SLICE = 1 << 16
"""Bytes that are looked at, or decoded, in one go. A string is long when two such slices or more are within it."""
_LONGEST_ESCAPE = 12
"""Bytes of a pair of surrogates."""
_LONGEST_CHARACTER = 4
_TEXT = msgspec.json.Decoder(str)


class LongTexts:
    """A JSON text without its long strings, and these."""

    def __init__(self, raw: bytes, size: int = SLICE) -> None:
        """What is not valid JSON stays invalid: what is left out is within a string, and is decoded as one."""
        self._secret = secrets.token_hex(16)
        self._size = size
        self._found: list[bytes] = []
        self.rest = raw
        """The JSON text to decode."""
        parts, kept = [], 0
        for begin, end in _places(raw, size):
            parts += [raw[kept:begin], self._name(len(self._found)).encode()]
            self._found.append(raw[begin:end])
            kept = end
        if parts:
            self.rest = b"".join([*parts, raw[kept:]])

    def put_back(self, value: Any) -> Any:
        """`value`, decoded from `rest`, with the long strings in their places. Raises msgspec.DecodeError and
        UnicodeDecodeError."""
        if not self._found:
            return value
        texts = {self._name(number): self._decoded(raw) for number, raw in enumerate(self._found)}
        return self._put(value, texts)

    def without_names(self, message: str) -> str:
        """A message that may quote a string."""
        return message.replace(self._secret, "...") if self._found else message

    def _put(self, value: Any, texts: dict[str, str]) -> Any:
        if isinstance(value, str):
            return texts.get(value, value)
        if isinstance(value, msgspec.Raw):
            return self._raw(value)
        if isinstance(value, list):
            value[:] = [self._put(item, texts) for item in value]
        elif isinstance(value, dict):
            for name, item in value.items():
                value[name] = self._put(item, texts)
        elif isinstance(value, msgspec.Struct):
            for name in value.__struct_fields__:
                before = getattr(value, name)
                if (after := self._put(before, texts)) is not before:
                    msgspec.structs.force_setattr(value, name, after)
        return value

    def _raw(self, value: msgspec.Raw) -> msgspec.Raw:
        raw = bytes(value)
        if self._secret.encode() not in raw:
            return value
        for number, found in enumerate(self._found):
            raw = raw.replace(f'"{self._name(number)}"'.encode(), b'"' + found + b'"')
        return msgspec.Raw(raw)

    def _name(self, number: int) -> str:
        """No client can guess it."""
        return f"{self._secret}-{number}"

    def _decoded(self, raw: bytes) -> str:
        return "".join([_TEXT.decode(b'"' + raw[begin:end] + b'"') for begin, end in pairwise(_cuts(raw, self._size))])


def _places(raw: bytes, size: int) -> Iterator[tuple[int, int]]:
    """Begin and end of the content of each long string that is no member's name."""
    inside, begin, whole = False, 0, 0
    escaped = False
    for at in range(0, len(raw), size):
        # In place of what is escaped there is something of the same length that is no quotation mark.
        piece = raw[at : at + size]
        piece = (b" " + piece[1:] if escaped else piece).replace(rb"\\", b"  ").replace(rb"\"", b"  ")
        escaped = piece.endswith(b"\\")
        marks = piece.count(b'"')
        if not marks:
            whole += 1
            continue
        end = at + piece.find(b'"')
        if inside and whole >= 2 and not raw[end + 1 : end + 1 + _LONGEST_ESCAPE].lstrip().startswith(b":"):
            yield begin, end
        inside ^= marks % 2 == 1
        begin, whole = at + piece.rfind(b'"') + 1, 0


def _cuts(raw: bytes, size: int) -> Sequence[int]:
    """Where the content of a string may be cut, about `size` bytes apart; its begin and its end too."""
    found = [0]
    while found[-1] + size < len(raw):
        found.append(_cut(raw, found[-1], found[-1] + size))
    return [*found, len(raw)]


def _cut(raw: bytes, last: int, at: int) -> int:
    """The last place up to `at` that is neither within a character nor within an escape or a pair of them. `last` is
    the place before, more than an escape away."""
    at = next((start for start in range(at, at - _LONGEST_CHARACTER, -1) if raw[start] & 0xC0 != 0x80), at)
    for begin in range(at - _LONGEST_ESCAPE + 1, at):
        if _escapes(raw, last, begin) and at < begin + _length(raw, begin):
            return begin
    return at


def _escapes(raw: bytes, last: int, at: int) -> bool:
    """Whether an escape begins there: a backslash that is not itself escaped."""
    before = raw[last:at]
    return raw[at] == ord("\\") and (len(before) - len(before.rstrip(b"\\"))) % 2 == 0


def _length(raw: bytes, at: int) -> int:
    """Of the escape that begins there; of both where it is the first of a pair of surrogates."""
    if raw[at + 1 : at + 2] != b"u":
        return 2
    return 12 if raw[at + 2 : at + 4].lower() in (b"d8", b"d9", b"da", b"db") and raw[at + 6 : at + 8] == rb"\u" else 6
