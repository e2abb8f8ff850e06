"""Messages made by hand are protobuf's messages, and the other way round."""

from __future__ import annotations

import pytest
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
