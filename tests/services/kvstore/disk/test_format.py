"""Slots as bytes: what a header says comes back, and nothing else passes for it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.services.kvstore.helpers import spec

from penstock.kvstore.tiers.disk.format import PAGE, Drop, Header, fingerprint, pack, parse, slot_bytes

MARK = fingerprint(spec())
HEADERS = st.builds(
    Header,
    key=st.binary(min_size=32, max_size=32),
    parent=st.binary(min_size=32, max_size=32),
    checksum=st.binary(min_size=16, max_size=16),
    namespace=st.binary(min_size=16, max_size=16),
    first_token=st.integers(0, 2**32 - 1),
    tokens=st.integers(0, 2**32 - 1),
    length=st.integers(1, 2**63),
    sequence=st.integers(0, 2**63),
    seconds=st.floats(0, 1e9),
    uses=st.integers(0, 2**32 - 1),
    retained_until=st.floats(0, 1e12),
)


@given(HEADERS)
def test_what_is_packed_is_parsed(header: Header) -> None:
    page = pack(header, MARK)
    assert len(page) == PAGE
    assert parse(page, MARK, header.length) == header


def test_more_uses_than_a_header_has_room_for_are_the_most_that_it_has() -> None:
    header = Header(bytes(32), bytes(32), bytes(16), bytes(16), 0, 16, 64, 1, 0.0, 2**32)
    assert parse(pack(header, MARK), MARK, 64) == replace(header, uses=2**32 - 1)


@given(HEADERS, st.integers(0, PAGE - 1), st.integers(1, 255))
def test_a_flipped_byte_is_found_out_or_means_nothing(header: Header, at: int, flip: int) -> None:
    page = bytearray(pack(header, MARK))
    page[at] ^= flip
    assert parse(page, MARK, header.length) in (header, Drop.TORN, Drop.FOREIGN)


@given(HEADERS, st.integers(0, PAGE))
def test_a_page_that_was_half_written_is_no_header(header: Header, cut: int) -> None:
    before, after = bytes(PAGE), pack(header, MARK)
    assert parse(after[:cut] + before[cut:], MARK, header.length) in (None, header, Drop.TORN)
    assert parse(before[:cut] + after[cut:], MARK, header.length) in (None, header, Drop.TORN)
    other = pack(replace(header, sequence=header.sequence ^ 1, key=header.key[::-1]), MARK)
    mixed = parse(after[:cut] + other[cut:], MARK, header.length)
    assert mixed in (Drop.TORN, header, parse(other, MARK, header.length))


@given(HEADERS)
def test_what_is_of_another_spec_version_or_size_is_foreign(header: Header) -> None:
    page = pack(header, MARK)
    assert parse(page, fingerprint(spec(dtype="bfloat16")), header.length) is Drop.FOREIGN
    assert parse(page, MARK, header.length + 1) is Drop.FOREIGN


def test_every_field_of_the_spec_counts() -> None:
    others = [
        spec(model="ef" * 32),
        spec(tokenizer="ef" * 32),
        spec(layout="v2"),
        spec(dtype="bfloat16"),
        spec(block_size=32),
        spec(8192),
    ]
    assert len({MARK, *(fingerprint(other) for other in others)}) == 7


def test_an_empty_slot_is_nothing() -> None:
    assert parse(bytes(PAGE), MARK, 1) is None
    assert parse(b"", MARK, 1) is Drop.TORN


def test_slots_are_whole_pages() -> None:
    assert [slot_bytes(size) for size in (1, 4096, 4097)] == [8192, 8192, 12288]
