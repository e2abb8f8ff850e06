"""Blocks cut into pieces and packed into messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.bytes.pieces import MESSAGE_BYTES, MESSAGE_PIECES, Assembly, packed, split


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


@given(st.integers(1, 9), st.integers(1, 12), st.lists(st.integers(1, 30), max_size=20))
def test_parts_of_any_length_fill_the_buffers(blocks: int, block_bytes: int, lengths: list[int]) -> None:
    """Whatever the cuts, the same as one copy of everything; buffers are taken and told as they fill."""
    content = bytes(number % 251 for number in range(blocks * block_bytes))
    buffers = [memoryview(bytearray(block_bytes)) for _ in range(blocks)]
    assembly, at, told = Assembly(buffers, block_bytes), 0, 0
    for length in [*lengths, len(content)]:
        part = memoryview(content)[at : at + length]
        if part:
            told += len(assembly.add(at, part))
            at += len(part)
            assert told == len(assembly.whole) == at // block_bytes
    assert b"".join(assembly.whole) == content


def test_a_message_has_not_too_many_pieces() -> None:
    parts = [(2 * at, 2 * at + 1) for at in range(256)]
    messages = list(packed(range(100), 512, 0, parts))
    assert [len(pieces) for pieces in messages] == [MESSAGE_PIECES] * 6 + [25_600 - 6 * MESSAGE_PIECES]
    assert [piece for pieces in messages for piece in pieces] == [
        (index, begin, 1) for index in range(100) for begin, _ in parts
    ]


@pytest.mark.parametrize(
    "parts",
    [
        [(1, b"abc")],
        [(0, b"")],
        [(0, b"ab"), (1, b"cd")],
        [(0, b"ab"), (4, b"abcd")],
        [(0, b"abcd"), (4, b"abcde")],
        [(0, b"abcdabcd"), (8, b"a")],
    ],
)
def test_a_part_out_of_order_is_refused(parts: list[tuple[int, bytes]]) -> None:
    assembly = Assembly([memoryview(bytearray(4)) for _ in range(2)], 4)
    with pytest.raises(ValueError, match=r"instead of|beyond"):
        for at, data in parts:
            assembly.add(at, memoryview(data))


@given(st.integers(1, 40), st.lists(st.integers(0, 255), max_size=50))
def test_splitting_is_slicing(size: int, values: list[int]) -> None:
    data = b"".join(bytes([value]) * size for value in values)
    assert split(data, size) == [data[at : at + size] for at in range(0, len(data), size)]
    if size > 1:
        with pytest.raises(ValueError, match="not a number of items"):
            split(data + b"x", size)
