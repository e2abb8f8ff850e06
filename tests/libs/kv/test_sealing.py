"""Sealed blocks open for who has the key of their tenant, under their own name, as they were sealed."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.sealing import SEAL_KEY_BYTES, TRAILER_BYTES, Seal, is_sealed, seal_key, sealed
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
