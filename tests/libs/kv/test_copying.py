"""Copies are copies, whatever the size and the kind of memory."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from penstock.kv.bytes import copying
from penstock.kv.bytes.checksum import checksum
from penstock.kv.bytes.copying import copy_and_sum, copy_bytes, sum_and_copy


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 15, (1 << 20) + 7])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_copy_equals_its_source(size: int, kind: type) -> None:
    source = kind(os.urandom(size))
    target = bytearray(size + 2)
    copy_bytes(memoryview(target)[1:-1], memoryview(source))
    assert target == b"\0" + source + b"\0"


@pytest.mark.parametrize("size", [0, 1, 4096, 4 << 20, (4 << 20) + 1, (5 << 20) + 77])
@pytest.mark.parametrize("at_once", [copy_and_sum, sum_and_copy])
def test_copying_and_summing_at_once_is_one_after_the_other(size: int, at_once: Callable[..., bytes]) -> None:
    source, target = bytearray(os.urandom(size)), bytearray(size)
    assert at_once(memoryview(target), memoryview(source)) == checksum(source)
    assert target == source
    with pytest.raises(ValueError, match="different"):
        at_once(memoryview(target), memoryview(source + b"x"))


@pytest.mark.parametrize("size", [4096, 5 << 20])
def test_each_sums_what_nobody_else_can_change(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes into the shared side right after the copy: a reader tells from its copy, a writer vouches
    for its own bytes."""
    shared, own = bytearray(os.urandom(size)), bytearray(os.urandom(size))

    def then_harm(target: memoryview, source: memoryview) -> None:
        target[:] = source
        shared[0] ^= 1

    monkeypatch.setattr(copying, "copy_bytes", then_harm)
    before = bytes(own)
    assert sum_and_copy(memoryview(shared), memoryview(own)) == checksum(before)
    assert copy_and_sum(memoryview(own), memoryview(shared)) == checksum(own)


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_target_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="different"):
        copy_bytes(memoryview(bytearray(size)), memoryview(bytearray(size + 1)))
