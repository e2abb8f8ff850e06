"""The name of a KV block.

A block holds the keys and values of `block_size` consecutive tokens. Its name is a hash chain::

    key_i  = sha256(key_{i-1} || token ids of block i, 4 bytes each, little-endian || its pictures)
    key_-1 = root = sha256 over the tagged, length-prefixed fields of the KvSpec, the adapter and the namespace

so that two processes agree on a name exactly when they agree on the model's weights, the tokenizer, the layout,
the tenant's namespace and every token from the first one on. The tokens in a picture's places are the same for all
pictures of a size, so a block that a picture touches names it: by its digest, and by where it begins, 4 bytes, signed,
relative to the block. The name depends on nothing else: not on the process, the language or the order of a dictionary.
`tests/libs/kv/test_identity.py` publishes vectors.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

from penstock.kv.spec import KvSpec

KEY_BYTES = 32
NAMESPACE_BYTES = 16
"""Of a namespace, where it only names a tenant and protects nothing."""
MAX_KEYS = 65_536
"""Most keys of one call to a store; more than any context, and far below a message's limit."""
MAX_BATCH = 2_048
"""Most blocks of one Reserve or Commit: the store answers such a call in one step of its event loop."""
TOKEN_BYTES = 4
"""Of a packed token."""
_OFFSET = struct.Struct("<i")
_ROOT_TAG = b"penstock block chain v1"


def namespace(server_key: bytes, tenant: str) -> bytes:
    """The tenant's part of every key: 32 bytes that can be produced only with `server_key`."""
    return hmac.digest(server_key, tenant.encode(), "sha256")


def root_key(spec: KvSpec, namespace: bytes, adapter: str = "") -> bytes:
    """key_{-1} of every chain of one tenant on one model."""
    digest = hashlib.sha256(_ROOT_TAG)
    parts = [(field.name, str(getattr(spec, field.name)).encode()) for field in fields(spec)]
    for name, value in [*parts, ("adapter", adapter.encode()), ("namespace", namespace)]:
        for piece in (name.encode(), value):
            digest.update(len(piece).to_bytes(4, "little"))
            digest.update(piece)
    return digest.digest()


def block_keys(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """The keys of all full blocks of `tokens`, in order."""
    return extend_keys(root, [], tokens, block_size)


class PictureSpan(NamedTuple):
    """Where a picture stands in a sequence."""

    first: int
    """Position of its first token."""
    end: int
    """Behind its last one."""
    digest: bytes
    """32 bytes: of what the model sees."""


class Chain:
    """The keys of a growing sequence's full blocks. One object serves all who name the sequence's blocks."""

    def __init__(
        self,
        root: bytes,
        block_size: int,
        tokens: Sequence[int] = (),
        known: Sequence[bytes] = (),
        *,
        pictures: Sequence[PictureSpan] = (),
    ) -> None:
        """`root` is the parent of the first block; `tokens` are those known so far, `known` the keys of their first
        blocks, and `pictures` all that the sequence has, in order."""
        self.root = root
        self.block_size = block_size
        self.pictures = pictures
        self.keys = list(known)
        """Of all full blocks so far, from the first on. Only ever grows."""
        self.cover(tokens)

    def cover(self, tokens: Sequence[int]) -> None:
        """Adds the keys of the full blocks of `tokens`, which are all tokens so far. Costs only the new blocks."""
        done = len(self.keys) * self.block_size
        if len(tokens) - done < self.block_size:
            return
        parent, ids = self.parent(len(self.keys)), packed(tokens[done:])
        step = TOKEN_BYTES * self.block_size
        for start in range(0, len(ids) - step + 1, step):
            seen = self._seen(len(self.keys)) if self.pictures else b""
            parent = hashlib.sha256(parent + ids[start : start + step] + seen).digest()
            self.keys.append(parent)

    def _seen(self, block: int) -> bytes:
        """The pictures that touch a block, as its key covers them."""
        begin, end = block * self.block_size, (block + 1) * self.block_size
        touching = [one for one in self.pictures if one.first < end and one.end > begin]
        return b"".join(one.digest + _OFFSET.pack(one.first - begin) for one in touching)

    def touches_pictures(self, first: int, end: int) -> bool:
        """Whether tokens from `first` to `end` are of a picture: then they alone do not say what their KV is."""
        return any(one.first < end and one.end > first for one in self.pictures)

    def parent(self, block: int) -> bytes:
        """The key before that of the block with this number."""
        return self.keys[block - 1] if block else self.root


def extend_keys(
    root: bytes,
    known: Sequence[bytes],
    tokens: Sequence[int],
    block_size: int,
    pictures: Sequence[PictureSpan] = (),
) -> list[bytes]:
    """`block_keys`, given the keys of the first blocks: the cost is that of the new tokens alone."""
    return Chain(root, block_size, tokens, known, pictures=pictures).keys


def packed(tokens: Sequence[int]) -> bytes:
    """As keys cover them: 4 bytes each, little-endian."""
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
