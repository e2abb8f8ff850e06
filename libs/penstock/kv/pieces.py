"""How blocks are cut and packed into messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MESSAGE_BYTES = 1 << 20
"""Of data in one message: far below gRPC's limit, and near the size at which its streams are fastest."""

Piece = tuple[int, int, int]
"""Index of a block, offset inside it, length."""


def packed(indices: Iterable[int], block_bytes: int) -> Iterator[list[Piece]]:
    """Cuts blocks into pieces and packs the pieces, in order, into lists of at most MESSAGE_BYTES."""
    pieces: list[Piece] = []
    room = MESSAGE_BYTES
    for index in indices:
        at = 0
        while at < block_bytes:
            length = min(block_bytes - at, room)
            pieces.append((index, at, length))
            at += length
            room -= length
            if room == 0:
                yield pieces
                pieces, room = [], MESSAGE_BYTES
    if pieces:
        yield pieces


class Assembly:
    """Puts the pieces of blocks 0, 1, ... together again, in the order in which `packed` cut them."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.whole: list[memoryview] = []
        """The leading blocks that are complete, in buffers of their own."""
        self._blocks = blocks
        self._block_bytes = block_bytes
        self._current = memoryview(b"")
        self._at = 0

    def add(self, index: int, at: int, data: bytes) -> None:
        """The next piece. Raises ValueError when it is not the next one."""
        end = at + len(data)
        if (index, at) != (len(self.whole), self._at) or index >= self._blocks or not at < end <= self._block_bytes:
            raise ValueError(f"{len(data)} bytes at {at} of block {index} instead of {self._at} of {len(self.whole)}")
        if at == 0:
            self._current = memoryview(bytearray(self._block_bytes))
        self._current[at:end] = data
        self._at = end
        if end == self._block_bytes:
            self.whole.append(self._current)
            self._at = 0
