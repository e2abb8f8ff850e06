"""Blocks cut into pieces and packed into messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.pieces import MESSAGE_BYTES, Assembly, packed


@given(st.integers(0, 40), st.integers(1, 3 * MESSAGE_BYTES))
def test_every_byte_once_in_order_in_full_messages(blocks: int, block_bytes: int) -> None:
    messages = list(packed(range(blocks), block_bytes))
    sizes = [sum(length for _, _, length in pieces) for pieces in messages]
    assert all(size == MESSAGE_BYTES for size in sizes[:-1])
    assert all(0 < size <= MESSAGE_BYTES for size in sizes)
    at = 0
    for index, offset, length in (piece for pieces in messages for piece in pieces):
        assert length > 0
        assert (index, offset) == divmod(at, block_bytes)
        at += length
    assert at == blocks * block_bytes


def test_pieces_become_blocks_again() -> None:
    size = MESSAGE_BYTES // 2 + 100
    blocks = [bytes([number]) * size for number in range(5)]
    assembly = Assembly(5, size)
    for pieces in packed(range(5), size):
        for index, at, length in pieces:
            assembly.add(index, at, blocks[index][at : at + length])
    assert [bytes(view) for view in assembly.whole] == blocks


@pytest.mark.parametrize(
    "pieces",
    [
        [(1, 0, b"abc")],
        [(0, 1, b"abc")],
        [(0, 0, b"")],
        [(0, 0, b"abcde")],
        [(0, 0, b"ab"), (0, 1, b"cd")],
        [(0, 0, b"ab"), (1, 0, b"abcd")],
        [(0, 0, b"abcd"), (1, 0, b"abcd"), (2, 0, b"abcd")],
    ],
)
def test_a_piece_out_of_order_is_refused(pieces: list[tuple[int, int, bytes]]) -> None:
    assembly = Assembly(2, 4)
    with pytest.raises(ValueError, match="instead of"):
        for index, at, data in pieces:
            assembly.add(index, at, data)
