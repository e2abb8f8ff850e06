"""The checksum that every stored block carries."""

from __future__ import annotations

import xxhash

CHECKSUM_BYTES = 16


def checksum(data: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128 of `data`: against torn, stale and flipped bytes, not against an attacker. Releases the GIL."""
    return xxhash.xxh3_128_digest(data)
