"""What of a block is far, what can be told from its mark, and how long its near part is needed."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.bytes.pieces import MESSAGE_BYTES, Assembly, packed
from penstock.kv.parts import MARK_BYTES, BlockParts, Reach, far_key, parted, whole_key
from penstock.kv.spec import KvSpec

SIZE = 16
PARTS = BlockParts(120, ((20, 40), (60, 100)), Reach(32))
reaches = st.builds(Reach, st.integers(1, 100), st.booleans())


def marked(key: bytes, block: bytes) -> memoryview:
    return memoryview(bytearray(block + PARTS.mark(key, memoryview(block))))


def test_the_pieces_of_both_parts_are_the_block() -> None:
    assert PARTS.near == [(0, 20), (40, 60), (100, 120)]
    assert sorted([*PARTS.near, *PARTS.far]) == [(0, 20), (20, 40), (40, 60), (60, 100), (100, 120)]
    assert PARTS.far_bytes == 60 + MARK_BYTES
    assert BlockParts(8, (), Reach(1)).near == [(0, 8)]
    assert BlockParts(8, ((0, 8),), Reach(1)).near == []


@pytest.mark.parametrize("at", range(0, 136, 3))
def test_a_mark_tells_of_every_far_byte_and_of_no_near_one(at: int) -> None:
    block = marked(b"k", os.urandom(120))
    assert PARTS.marked(b"k", block) and not PARTS.marked(b"another", block)
    block[at] ^= 1
    near = any(begin <= at < end for begin, end in PARTS.near)
    assert PARTS.marked(b"k", block) == near


def test_a_copy_of_the_far_part_is_that() -> None:
    block, into = marked(b"k", os.urandom(120)), bytearray(120)
    PARTS.copy(memoryview(into), block)
    for begin, end in PARTS.far:
        assert into[begin:end] == block[begin:end]
    for begin, end in PARTS.near:
        assert into[begin:end] == bytes(end - begin)


def test_blocks_with_marks_are_never_taken_for_others() -> None:
    spec = KvSpec(model="m", tokenizer="t", layout="lkbhd-v1", dtype="float32", block_size=16, block_bytes=120)
    assert "layout" in (parted(spec).difference(spec) or "")
    assert parted(spec).block_bytes == 120 + MARK_BYTES
    key = os.urandom(32)
    assert far_key(key) != key == whole_key(far_key(key)) == whole_key(key)


@given(reaches, st.integers(0, 400))
def test_a_row_sees_its_window_or_its_chunk(reach: Reach, position: int) -> None:
    seen = [
        at
        for at in range(position + 1)
        if (at // reach.tokens == position // reach.tokens if reach.chunked else position - at < reach.tokens)
    ]
    assert reach.first(position) == seen[0]


@given(reaches, st.integers(1, 40), st.integers(1, 20))
def test_no_row_that_is_computed_later_sees_a_near_part_that_is_left_out(
    reach: Reach, blocks: int, block_size: int
) -> None:
    """Rows are computed from the last token of the prefix on."""
    far = reach.far(blocks, block_size)
    assert 0 <= far < blocks or far == 0
    end = blocks * block_size
    assert all(reach.first(position) >= far * block_size for position in range(end - 1, end + 200))
    assert reach.first(blocks * block_size - 1) < (far + 1) * block_size, "no more is read than has to be"


@given(reaches, st.lists(st.booleans(), max_size=40), st.integers(1, 9))
def test_the_longest_usable_prefix(reach: Reach, whole: list[bool], block_size: int) -> None:
    usable = [end for end in range(len(whole) + 1) if all(whole[reach.far(end, block_size) : end])]
    assert reach.usable(whole, block_size) == max(usable)


@given(st.integers(0, 5), st.integers(1, 300), st.integers(0, 59), st.integers(1, 100))
def test_ranges_of_blocks_arrive_where_they_belong(blocks: int, scale: int, start: int, cut: int) -> None:
    """In messages of any length, and from any place on."""
    size, wanted = 136 * scale, [(begin * scale, end * scale) for begin, end in PARTS.wanted]
    content = [os.urandom(size) for _ in range(blocks)]
    sent = [(index, at, length) for pieces in packed(range(blocks), size, 0, wanted) for index, at, length in pieces]
    stream = b"".join(content[index][at : at + length] for index, at, length in sent)
    assert stream == b"".join(one[begin:end] for one in content for begin, end in wanted)
    later = [piece for pieces in packed(range(blocks), size, start, wanted) for piece in pieces]
    assert b"".join(content[index][at : at + length] for index, at, length in later) == stream[start:]
    assert all(sum(length for _, _, length in part) <= MESSAGE_BYTES for part in packed(range(blocks), size, 0, wanted))
    into = [memoryview(bytearray(size)) for _ in range(blocks)]
    assembly, at = Assembly(into, size, wanted), 0
    while at < len(stream):
        assembly.add(at, memoryview(stream)[at : at + cut * scale])
        at += cut * scale
    assert len(assembly.whole) == blocks
    for one, there in zip(content, into, strict=True):
        assert all(there[begin:end] == one[begin:end] for begin, end in wanted)
