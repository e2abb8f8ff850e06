"""Sealed blocks open for who has the key of their tenant, under their own name, as they were sealed."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.parts import BlockParts, Reach, parted
from penstock.kv.sealing import (
    SEAL_KEY_BYTES,
    TRAILER_BYTES,
    Seal,
    far_pieces,
    is_sealed,
    seal_key,
    sealed,
    trailer_bytes,
)
from penstock.kv.spec import KvSpec

pytestmark = pytest.mark.attack


SERVER = b"s" * 32
NAME, OTHER = b"n" * 32, b"o" * 32
SPEC = KvSpec(model="m", tokenizer="t", layout="v1", dtype="float32", block_size=16, block_bytes=4096)


def closed(block: bytes, key: bytes = SERVER, name: bytes = NAME) -> memoryview:
    into = memoryview(bytearray(len(block) + TRAILER_BYTES))
    Seal(key).close(name, memoryview(block), into)
    return into


def opened(whole: memoryview, key: bytes = SERVER, name: bytes = NAME) -> bytes | None:
    into = memoryview(bytearray(b"x" * (len(whole) - TRAILER_BYTES)))
    if Seal(key).open(name, whole, into):
        return bytes(into)
    assert bytes(into) == bytes(len(into)), "nothing of it is left"
    return None


@given(block=st.binary(min_size=1, max_size=5000))
def test_what_is_sealed_opens(block: bytes) -> None:
    whole = closed(block)
    assert opened(whole) == block
    assert len(block) < 8 or block not in bytes(whole)


@given(block=st.binary(min_size=64, max_size=500), at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_no_byte_can_be_changed(block: bytes, at: int, flip: int) -> None:
    whole = closed(block)
    at %= len(block) + 28  # behind the nonce are zeros that nobody reads
    whole[at] ^= flip
    assert opened(whole) is None


def test_it_opens_under_no_other_name_and_for_no_other_tenant() -> None:
    block = random.Random(1).randbytes(4096)
    mine, anothers = seal_key(SERVER, "mine"), seal_key(SERVER, "another's")
    assert len(mine) == len(anothers) == SEAL_KEY_BYTES and mine != anothers
    whole = closed(block, mine)
    assert opened(whole, mine) == block
    assert opened(whole, anothers) is None
    assert opened(whole, seal_key(b"t" * 32, "mine")) is None
    assert opened(whole, mine, OTHER) is None


def test_equal_blocks_are_sealed_differently() -> None:
    """Who sees two sealed blocks does not see that they are the same, and no nonce comes twice."""
    block = bytes(256)
    seen = Counter(bytes(closed(block)) for _ in range(200))
    nonces = {whole[256 + 16 : 256 + 28] for whole in seen}
    assert len(seen) == len(nonces) == 200


def test_specs_of_sealed_blocks_are_no_others() -> None:
    assert is_sealed(sealed(SPEC)) and not is_sealed(SPEC)
    assert sealed(SPEC).block_bytes == 4096 + TRAILER_BYTES
    assert "layout" in (sealed(SPEC).difference(SPEC) or "")


@pytest.mark.parametrize("size", [1, 15, 16, 17, 4095])
def test_any_size(size: int) -> None:
    block = random.Random(size).randbytes(size)
    assert opened(closed(block)) == block


PARTS = BlockParts(4096, ((512, 768), (2048, 2560)), Reach(64))


def with_parts(block: bytes) -> memoryview:
    into = memoryview(bytearray(len(block) + trailer_bytes(PARTS)))
    Seal(SERVER, PARTS).close(b"name", memoryview(block), into)
    return into


def test_a_far_part_is_opened_from_its_pieces_alone() -> None:
    block = random.Random(1).randbytes(4096)
    whole, pieces = with_parts(block), memoryview(bytearray(4096 + trailer_bytes(PARTS)))
    for begin, end in far_pieces(PARTS):
        pieces[begin:end] = whole[begin:end]
    into, all_of_it = memoryview(bytearray(4096)), memoryview(bytearray(4096))
    assert Seal(SERVER, PARTS).open_far(b"name", pieces, into)
    assert not Seal(SERVER, PARTS).open(b"name", pieces, all_of_it) and not any(all_of_it)
    assert Seal(SERVER, PARTS).open(b"name", whole, all_of_it) and all_of_it == block
    for begin, end in PARTS.far:
        assert into[begin:end] == block[begin:end]
        into[begin:end] = bytes(end - begin)
    assert not any(into)


@pytest.mark.parametrize("far", [(), ((0, 512),), ((100, 4000),), ((0, 4096),), ((512, 768), (2048, 2560))])
def test_parts_of_any_number_of_pieces(far: tuple[tuple[int, int], ...]) -> None:
    """Where a part does not open, nothing of it is left, and the rest stays as it is."""
    parts, block = BlockParts(4096, far, Reach(64)), random.Random(1).randbytes(4096)
    whole = memoryview(bytearray(4096 + trailer_bytes(parts)))
    seal, into = Seal(SERVER, parts), memoryview(bytearray(4096))
    seal.close(b"name", memoryview(block), whole)
    assert seal.open(b"name", whole, into) and into == block
    into[:] = b"x" * 4096
    assert seal.open_far(b"name", whole, into)
    for begin, end in far:
        assert into[begin:end] == block[begin:end]
    assert all(bytes(into[begin:end]) == b"x" * (end - begin) for begin, end in parts.near)
    assert not seal.open_far(b"another", whole, into)
    assert not any(any(into[begin:end]) for begin, end in far)
    assert all(bytes(into[begin:end]) == b"x" * (end - begin) for begin, end in parts.near)


def test_a_part_is_not_taken_for_the_other_nor_for_that_of_another_block() -> None:
    """Both parts are of one size here."""
    parts = BlockParts(64, ((0, 32),), Reach(8))
    block, whole = random.Random(1).randbytes(64), memoryview(bytearray(128))
    Seal(SERVER, parts).close(b"name", memoryview(block), whole)
    pieces = [whole[48:96], whole[:48], whole[108:120], whole[96:108], bytes(8)]
    swapped = memoryview(bytearray(b"".join(pieces)))
    into = memoryview(bytearray(64))
    assert Seal(SERVER, parts).open(b"name", whole, into) and into == block
    assert not Seal(SERVER, parts).open(b"name", swapped, into) and not any(into)
    assert not Seal(SERVER, parts).open_far(b"name", swapped, into)
    assert not Seal(SERVER, parts).open_far(b"another", whole, into)
    assert not Seal(bytes(32), parts).open_far(b"name", whole, into)


@pytest.mark.parametrize("at", range(0, 4096 + 64 - 8, 97))
def test_no_byte_of_a_part_can_be_changed(at: int) -> None:
    block = random.Random(1).randbytes(4096)
    whole = with_parts(block)
    whole[at] ^= 1
    assert not Seal(SERVER, PARTS).open(b"name", whole, memoryview(bytearray(4096)))
    far = any(begin <= at < end for begin, end in far_pieces(PARTS))
    assert Seal(SERVER, PARTS).open_far(b"name", whole, memoryview(bytearray(4096))) != far


def test_blocks_that_are_sealed_in_parts_are_never_taken_for_others() -> None:
    found = sealed(SPEC, PARTS)
    assert is_sealed(found) and found.block_bytes == 4096 + trailer_bytes(PARTS)
    assert len({found.layout, sealed(SPEC).layout, parted(SPEC).layout, SPEC.layout}) == 4
