"""Copies are copies, whatever the size and the kind of memory."""

from __future__ import annotations

import os

import pytest

from penstock.kv.checksum import checksum
from penstock.kv.copying import copy_and_sum, copy_bytes


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 15, (1 << 20) + 7])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_copy_equals_its_source(size: int, kind: type) -> None:
    source = kind(os.urandom(size))
    target = bytearray(size + 2)
    copy_bytes(memoryview(target)[1:-1], memoryview(source))
    assert target == b"\0" + source + b"\0"


@pytest.mark.parametrize("size", [0, 1, 4096, 512 << 10, (512 << 10) + 1, (3 << 20) + 77])
def test_copying_and_summing_at_once_is_one_after_the_other(size: int) -> None:
    source, target = bytearray(os.urandom(size)), bytearray(size)
    assert copy_and_sum(memoryview(target), memoryview(source)) == checksum(source)
    assert target == source


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_target_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="different"):
        copy_bytes(memoryview(bytearray(size)), memoryview(bytearray(size + 1)))
