"""A long list of numbers in a JSON text, decoded in slices.

A decoder makes a list in one go and keeps Python's global lock meanwhile: two million token ids take longer than other
clients' streams may wait. So most of the list is taken out of the text before it is decoded, with a number in its place
that no client can guess; it is decoded slice by slice, between which other threads run, and put where that number is.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import msgspec

SLICE = 1 << 16
"""Bytes that are looked at, or decoded, in one go. A list is long when two such slices or more are within it."""
_NUMERIC = b"0123456789+-.eE, \t\r\n"
_NUMBERS = msgspec.json.Decoder(list[int])


class LongNumbers:
    """A JSON text without most of its first long list of numbers, and that."""

    def __init__(self, raw: bytes, size: int = SLICE) -> None:
        self._size = size
        self._mark = secrets.randbits(62)
        self._found = b""
        self.rest = raw
        """The JSON text to decode."""
        begin, end = _place(raw, size)
        if begin < end:
            self._found = raw[begin:end]
            self.rest = b"".join([raw[:begin], str(self._mark).encode(), raw[end:]])

    def put_back(self, numbers: list[int]) -> list[int]:
        """`numbers`, decoded from `rest`, with those that are missing there. Raises msgspec.DecodeError for what is no
        whole number."""
        if not self._found or self._mark not in numbers:
            return numbers
        at = numbers.index(self._mark)
        whole = numbers[:at]
        for part in self._parts():
            more = _NUMBERS.decode(b"[" + part + b"]")
            if not more:
                raise msgspec.DecodeError("JSON is malformed: trailing comma in array")
            whole += more
        whole += numbers[at + 1 :]
        return whole

    def _parts(self) -> Iterator[bytes]:
        """Between commas, about `size` bytes each."""
        at = 0
        while (end := self._found.find(b",", at + self._size)) >= 0:
            yield self._found[at:end]
            at = end + 1
        yield self._found[at:]


def _place(raw: bytes, size: int) -> tuple[int, int]:
    """Where what is left out begins, behind a comma, and ends, before one; the same place twice if nothing is."""
    begin = 0
    for at in range(0, len(raw) + size, size):
        if at + size <= len(raw) and not raw[at : at + size].translate(None, _NUMERIC):
            continue
        if at - begin >= 2 * size:
            return raw.find(b",", begin, at) + 1, raw.rfind(b",", begin, at)
        begin = at + size
    return 0, 0
