"""The model of a pretended mesh: its tokens follow from seed and position alone, a block's bytes from its key alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from penstock.kv.spec import KvSpec

NAME = "pretended"
BLOCK_SIZE, BLOCK_BYTES = 4, 4096
SPEC = KvSpec(
    model="ab" * 32,
    tokenizer="cd" * 32,
    layout="pretended",
    dtype="float32",
    block_size=BLOCK_SIZE,
    block_bytes=BLOCK_BYTES,
)
CONTEXT = 512
_VOCABULARY = 50_000


def token(seed: int, position: int) -> int:
    """The token at that position of an answer."""
    return int.from_bytes(hashlib.blake2b(b"%d.%d" % (seed, position), digest_size=4).digest(), "big") % _VOCABULARY


def answer(seed: int, count: int) -> Sequence[int]:
    """An answer's first tokens."""
    return [token(seed, position) for position in range(count)]


def content(key: bytes) -> bytes:
    """The bytes of the block with that key."""
    return hashlib.shake_128(key).digest(BLOCK_BYTES)
