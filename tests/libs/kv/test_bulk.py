"""Messages made by hand are protobuf's messages, and the other way round."""

from __future__ import annotations

import time

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.bytes.bulk import decode, encode
from penstock.v1.kvstore_pb2 import BlockBytes

positions = st.integers(0, 2**64 - 1)
pieces = st.lists(st.binary(max_size=300), max_size=5)


@given(positions, pieces)
def test_protobuf_reads_what_is_encoded(at: int, parts: list[bytes]) -> None:
    assert BlockBytes.FromString(encode(at, [memoryview(part) for part in parts])) == BlockBytes(
        at=at, data=b"".join(parts)
    )


@given(positions, pieces)
def test_what_is_encoded_is_decoded(at: int, parts: list[bytes]) -> None:
    begin, data = decode(encode(at, [memoryview(part) for part in parts]))
    assert (begin, bytes(data)) == (at, b"".join(parts))


@given(positions, st.binary(max_size=300))
def test_what_protobuf_writes_is_decoded(at: int, content: bytes) -> None:
    begin, data = decode(BlockBytes(at=at, data=content).SerializeToString())
    assert (begin, bytes(data)) == (at, content)


@pytest.mark.parametrize(
    "message",
    [
        b"\x08" + b"\xff" * 9 + b"\x01\x12\x01q",
        b"\x08\x85" + b"\x80" * 8 + b"\x00\x12\x01q",
        b"\x08" + b"\xff" * 9 + b"\x7f\x12\x01q",
        b"\x08\x05\x12\x81\x80\x80\x80\x00q",
        b"\x08\x05\x12\x81\x80\x80\x80\x80\x00q",
        b"\x08" + b"\xff" * 1_000_000 + b"\x01\x12\x01q",
    ],
)
def test_long_numbers_are_what_protobuf_says_and_take_no_time(message: bytes) -> None:
    begin = time.process_time()
    try:
        expected = BlockBytes.FromString(message)
    except DecodeError:
        with pytest.raises(ValueError, match="not a BlockBytes"):
            decode(message)
    else:
        at, content = decode(message)
        assert (at, bytes(content)) == (expected.at, expected.data)
    assert time.process_time() - begin < 0.1


@given(st.binary(max_size=40))
def test_whatever_comes_is_what_protobuf_says(message: bytes) -> None:
    try:
        expected = BlockBytes.FromString(message)
    except Exception:
        with pytest.raises(ValueError, match="not a BlockBytes"):
            decode(message)
        return
    begin, data = decode(message)
    assert (begin, bytes(data)) == (expected.at, expected.data)
