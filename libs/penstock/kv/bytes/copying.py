"""memcpy that lets other threads run, alone and together with the checksum of the copied bytes."""

from __future__ import annotations

import ctypes

import xxhash

from penstock.kv.bytes.checksum import checksum

_SMALL_BYTES = 128 << 10
"""Copied before another thread would have got the GIL."""
_CHUNK_BYTES = 1 << 20
"""Stays in a cache between its copy and its checksum; in smaller ones the calls cost more than that saves."""


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """`target[:] = source`; when they are large, and `source` is not read-only, without the GIL.

    Matters where pages are touched for the first time: a page fault costs more than the copy of the page.
    """
    size = source.nbytes
    if size < _SMALL_BYTES or source.readonly or target.nbytes != size:
        target[:] = source
        return
    whole = ctypes.c_char * size
    ctypes.memmove(whole.from_buffer(target), whole.from_buffer(source), size)


def copy_and_sum(target: memoryview, source: memoryview, behind: bytes = b"") -> bytes:
    """Copies, and returns the checksum of the copy and of what stands behind it: for readers of memory that others may
    write."""
    return _copy_and_sum(target, source, target, behind)


def sum_and_copy(target: memoryview, source: memoryview, behind: bytes = b"") -> bytes:
    """Copies, and returns the checksum of the source and of what stands behind it: for writers of memory that others
    may write."""
    return _copy_and_sum(target, source, source, behind)


def _copy_and_sum(target: memoryview, source: memoryview, summed: memoryview, behind: bytes) -> bytes:
    size = source.nbytes
    if size <= 4 * _CHUNK_BYTES and not behind:
        copy_bytes(target, source)
        return checksum(summed)
    digest = xxhash.xxh3_128()
    for start in range(0, size, _CHUNK_BYTES):
        end = start + _CHUNK_BYTES
        copy_bytes(target[start:end], source[start:end])
        digest.update(summed[start:end])
    digest.update(behind)
    return digest.digest()
