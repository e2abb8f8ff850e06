"""How blocks are cut and packed into messages, and put together again."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from penstock.kv.bytes.copying import copy_bytes

MESSAGE_BYTES = 1 << 20
"""Of data in one message: far below gRPC's limit, and near the size at which its streams are fastest."""

Piece = tuple[int, int, int]
"""Index of a block, offset inside it, length."""


def packed(indices: Iterable[int], block_bytes: int, start: int = 0) -> Iterator[list[Piece]]:
    """Cuts blocks into pieces and packs the pieces, in order, into lists of at most MESSAGE_BYTES.

    The first `start` bytes of the first block are left out.
    """
    pieces: list[Piece] = []
    room = MESSAGE_BYTES
    at = start
    for index in indices:
        while at < block_bytes:
            length = min(block_bytes - at, room)
            pieces.append((index, at, length))
            at += length
            room -= length
            if room == 0:
                yield pieces
                pieces, room = [], MESSAGE_BYTES
        at = 0
    if pieces:
        yield pieces


def split(data: bytes, size: int) -> list[bytes]:
    """The items of `size` bytes that `data` consists of. Raises ValueError when it does not."""
    try:
        return [item for (item,) in struct.iter_unpack(f"{size}s", data)]
    except struct.error as error:
        raise ValueError(f"{len(data)} bytes are not a number of items of {size}") from error


class Assembly:
    """Fills buffers of one block each, one after the other, with parts that come in order."""

    def __init__(self, buffers: Iterable[memoryview], block_bytes: int) -> None:
        """A buffer is taken when its first byte has come."""
        self.whole: list[memoryview] = []
        """The leading buffers that are full."""
        self._buffers = iter(buffers)
        self._block_bytes = block_bytes
        self._current: memoryview | None = None
        self._at = 0

    def add(self, at: int, data: memoryview) -> list[memoryview]:
        """The next part; returns the buffers that it filled. Raises ValueError when it is not the next one."""
        if at != self._at or not data:
            raise ValueError(f"{len(data)} bytes at {at} instead of {self._at}")
        filled = []
        for start, end in self._cuts(at, len(data)):
            if self._current is None:
                self._current = next(self._buffers, None)
                if self._current is None:
                    raise ValueError(f"{len(data)} bytes at {at}, beyond the {len(self.whole)} blocks asked for")
            begin = start % self._block_bytes
            copy_bytes(self._current[begin : begin + end - start], data[start - at : end - at])
            if end % self._block_bytes == 0:
                self.whole.append(self._current)
                filled.append(self._current)
                self._current = None
        self._at += len(data)
        return filled

    def _cuts(self, at: int, length: int) -> Iterator[tuple[int, int]]:
        """The range, cut where blocks end."""
        end = at + length
        while at < end:
            stop = min(end, at - at % self._block_bytes + self._block_bytes)
            yield at, stop
            at = stop
