"""Counts the nodes of JSON before they become objects.

A decoder keeps Python's global lock, and a megabyte of `[],[],[],` becomes 350,000 lists, over which the garbage
collector runs again and again: every other client's stream would stand still meanwhile. So bytes are counted first,
slice by slice, which costs a few milliseconds and lets go of the lock in between.
"""

from __future__ import annotations

from itertools import accumulate

from penstock.errors import InvalidRequest
from penstock.gateway.request.bounds import MAX_DEPTH, MAX_ESCAPES, MAX_ITEMS, MAX_NODES

_NO_BRACKETS = bytes(code for code in range(256) if code not in b"[]{}")
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""A step in or, as a signed byte, out."""
_SLICE = 1 << 16
"""Bytes that are looked at in one go."""


class Nodes:
    """Counts the objects, arrays, members and escapes in all JSON texts of one request."""

    def __init__(self, most_items: int = MAX_ITEMS) -> None:
        self._most_items = most_items
        self._nodes = 0
        self._items = 0
        self._escapes = 0

    def add(self, raw: bytes, field: str | None = None) -> None:
        """Counts the nodes of `raw`; `field` is its place in the request, None for all of it. Raises InvalidRequest.

        Text that is not valid JSON gets an arbitrary count; the decoder reports that error.
        """
        quoted = escaped = False
        depth = 0
        for at in range(0, len(raw), _SLICE):
            self._escapes += raw.count(b"\\", at, at + _SLICE)
            piece = raw[at + escaped : at + _SLICE].replace(rb"\\", b"")
            escaped = piece.endswith(b"\\")
            parts = piece.replace(rb"\"", b"").split(b'"')
            bare = b" ".join(parts[1::2] if quoted else parts[::2])
            quoted ^= len(parts) % 2 == 0
            self._nodes += bare.count(b"{") + bare.count(b"[") + bare.count(b":")
            self._items += bare.count(b",")
            self._check(field)
            steps = memoryview(bare.translate(_STEPS, _NO_BRACKETS)).cast("b")
            deepest, depth = max(accumulate(steps, initial=depth)), depth + sum(steps)
            if deepest > MAX_DEPTH:
                what = f"{field or 'the body'}: more than {MAX_DEPTH} JSON objects and arrays inside each other"
                raise InvalidRequest(what, field=field, code="request_too_complex")

    def _check(self, field: str | None) -> None:
        where = f"{field}: " if field else "the body: "
        if self._nodes > MAX_NODES:
            what = f"{where}more than {MAX_NODES} JSON objects, arrays and members in one request"
            raise InvalidRequest(what, field=field, code="request_too_complex")
        if self._escapes > MAX_ESCAPES:
            what = f"{where}more than {MAX_ESCAPES} escaped characters in one request"
            raise InvalidRequest(what, field=field, code="request_too_complex")
        if self._items > self._most_items:
            what = f"{where}more than {self._most_items} JSON values in one request"
            raise InvalidRequest(what, field=field, code="request_too_complex")
