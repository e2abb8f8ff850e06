"""How blocks are cut and packed into messages, and put together again."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

from penstock.kv.bytes.copying import copy_bytes

MESSAGE_BYTES = 1 << 20
"""Of data in one message: far below gRPC's limit, and near the size at which its streams are fastest."""
MESSAGE_PIECES = 4096
"""In one message: whoever puts it together does nothing else meanwhile. They take it a few milliseconds."""

Piece = tuple[int, int, int]
"""Index of a block, offset inside it, length."""


Parts = Sequence[tuple[int, int]]
"""(Begin, end) of what is wanted of every block, in order."""


def packed(
    indices: Iterable[int], block_bytes: int, start: int = 0, parts: Parts | None = None
) -> Iterator[list[Piece]]:
    """Cuts blocks into pieces and packs the pieces, in order, into lists of at most MESSAGE_BYTES and MESSAGE_PIECES.

    The first `start` bytes of what is wanted of the first block are left out; without `parts` all of it is.
    """
    pieces: list[Piece] = []
    room = MESSAGE_BYTES
    for index in indices:
        for begin, end in ((0, block_bytes),) if parts is None else parts:
            at = min(begin + start, end)
            start -= at - begin
            while at < end:
                length = min(end - at, room)
                pieces.append((index, at, length))
                at += length
                room -= length
                if room == 0 or len(pieces) == MESSAGE_PIECES:
                    yield pieces
                    pieces, room = [], MESSAGE_BYTES
    if pieces:
        yield pieces


def split(data: bytes, size: int) -> list[bytes]:
    """The items of `size` bytes that `data` consists of. Raises ValueError when it does not."""
    try:
        return [item for (item,) in struct.iter_unpack(f"{size}s", data)]
    except struct.error as error:
        raise ValueError(f"{len(data)} bytes are not a number of items of {size}") from error


class Assembly:
    """Fills buffers of one block each, one after the other, with bytes that come in order."""

    def __init__(self, buffers: Iterable[memoryview], block_bytes: int, parts: Parts | None = None) -> None:
        """A buffer is taken when its first byte has come. Only what `parts` name is filled; None: all of it."""
        self.whole: list[memoryview] = []
        """The leading buffers that are full."""
        self._buffers = iter(buffers)
        self._parts = ((0, block_bytes),) if parts is None else tuple(part for part in parts if part[0] < part[1])
        self._part, self._place = 0, self._parts[0][0]
        """Where the next byte belongs."""
        self._current: memoryview | None = None
        self._at = 0

    def add(self, at: int, data: memoryview) -> list[memoryview]:
        """The next part; returns the buffers that it filled. Raises ValueError when it is not the next one."""
        if at != self._at or not data:
            raise ValueError(f"{len(data)} bytes at {at} instead of {self._at}")
        filled = []
        self._at += len(data)
        while data:
            if self._current is None:
                self._current = next(self._buffers, None)
                if self._current is None:
                    raise ValueError(f"{len(data)} bytes at {at}, beyond the {len(self.whole)} blocks asked for")
            end = self._parts[self._part][1]
            length = min(end - self._place, len(data))
            copy_bytes(self._current[self._place : self._place + length], data[:length])
            self._place, data = self._place + length, data[length:]
            if self._place == end:
                self._part = (self._part + 1) % len(self._parts)
                self._place = self._parts[self._part][0]
                if not self._part:
                    self.whole.append(self._current)
                    filled.append(self._current)
                    self._current = None
        return filled
