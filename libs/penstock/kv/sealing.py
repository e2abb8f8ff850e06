"""Sealed blocks: what stores, disks and the ways between them hold of a tenant's KV can be read and made by nobody but
the workers that serve a request of this tenant.

A sealed block is the block encrypted and authenticated, and behind it what is needed to open it::

    0             ciphertext, as long as the block
    block_bytes   tag, 16 bytes
    + 16          nonce, 12 random bytes
    + 28          zeros, 4 bytes

with AES-256-GCM (NIST SP 800-38D). Where blocks have parts (see penstock.kv.parts), each part is sealed by itself, so
that the far part can be read and opened alone. It comes first, its pieces one behind the other; what opens a part is
given as which one it is::

    0             ciphertext of the far part; tag, 16 bytes
    ...           ciphertext of the near part; tag, 16 bytes
    + 16          nonce of the far part, 12 random bytes; that of the near part
    + 24          zeros, 8 bytes

Each block has a key of its own, derived from the tenant's and from the block's name
(HMAC, RFC 2104), so nonces meet only where one block is sealed often, and a block that was moved under another name
does not open. The checksum that a store asks for is that of the sealed bytes: it can tell a torn block from a whole
one, and a forged one it can't, which is for readers to find.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from penstock.kv.bytes.copying import copy_bytes
from penstock.kv.parts import PARTED_LAYOUT, BlockParts
from penstock.kv.spec import KvSpec
from penstock.runtime.config import ConfigError

SEAL_KEY_BYTES = 32
SEALED_LAYOUT = "+aes256gcm"
"""Ends the layout of sealed blocks: they are never taken for others."""
TRAILER_BYTES = 32
"""What a seal adds to a block, or to each of its parts."""
_TAG_BYTES = 16
_NONCE_BYTES = 12
_PURPOSE = b"penstock block seal v1"
_FAR, _NEAR = b"far", b"near"


def seal_key(server_key: bytes, tenant: str) -> bytes:
    """The key of one tenant's blocks, which only who has the server key can produce."""
    return hmac.digest(server_key, _PURPOSE + tenant.encode(), "sha256")


def sealed(spec: KvSpec, parts: BlockParts | None = None) -> KvSpec:
    """The spec of such blocks once they are sealed, each of their `parts` by itself if they have any."""
    layout = spec.layout if parts is None else spec.layout + PARTED_LAYOUT
    return replace(spec, layout=layout + SEALED_LAYOUT, block_bytes=spec.block_bytes + trailer_bytes(parts))


def trailer_bytes(parts: BlockParts | None) -> int:
    """What a seal adds to a block."""
    return TRAILER_BYTES if parts is None else 2 * TRAILER_BYTES


def is_sealed(spec: KvSpec) -> bool:
    """Whether a spec is that of sealed blocks."""
    return spec.layout.endswith(SEALED_LAYOUT)


def check_seal(seal: bool) -> None:
    """Raises ConfigError for a setting of that name that can't be had here."""
    if seal and find_spec("cryptography") is None:
        raise ConfigError("seal", "true", "needs the package cryptography: pip install 'cryptography>=50'")


Pieces = Sequence[tuple[int, int]]
"""(Begin, end) in a block."""


class Seal:
    """Seals and opens the blocks of one tenant. Thread-safe; the interpreter lock is not held while many bytes are
    worked on, except to make room for parts of several pieces."""

    def __init__(self, key: bytes, parts: BlockParts | None = None) -> None:
        """`key` is that of `seal_key`. With `parts` each is sealed by itself."""
        self._key = key
        self._parts = parts

    def close(self, name: bytes, block: memoryview, into: memoryview) -> None:
        """Seals the block with this key into a buffer of its size and `trailer_bytes`, in one pass; a part of several
        pieces is put together before."""
        if self._parts is not None:
            return self._close_parts(name, block, into, self._parts)
        size = block.nbytes
        nonce = os.urandom(_NONCE_BYTES)
        self._cipher(name).encrypt_into(nonce, block, None, into[: size + _TAG_BYTES])
        into[size + _TAG_BYTES :] = nonce + bytes(TRAILER_BYTES - _TAG_BYTES - _NONCE_BYTES)

    def open(self, name: bytes, sealed: memoryview, into: memoryview) -> bool:
        """Opens a sealed block into a buffer of the block's size, in one pass; a part of several pieces is copied to
        their places after that. False, and nothing of it there, unless it is the block of this name that a holder of
        the key has sealed."""
        if self._parts is not None:
            good = self._open_far(name, sealed, into, self._parts) and self._open_near(name, sealed, into, self._parts)
            if not good:
                into[:] = bytes(into.nbytes)
            return good
        size = into.nbytes
        nonce = bytes(sealed[size + _TAG_BYTES : size + _TAG_BYTES + _NONCE_BYTES])
        try:
            self._cipher(name).decrypt_into(nonce, sealed[: size + _TAG_BYTES], None, into)
        except _invalid():
            into[:] = bytes(size)
            return False
        return True

    def open_far(self, name: bytes, sealed: memoryview, into: memoryview) -> bool:
        """As `open`, of the far part of blocks that have one: of `sealed` only what `far_pieces` says is looked at, and
        of `into` only the far part is written."""
        assert self._parts is not None
        return self._open_far(name, sealed, into, self._parts)

    def _close_parts(self, name: bytes, block: memoryview, into: memoryview, parts: BlockParts) -> None:
        cipher, size = self._cipher(name), far_size(parts)
        nonces = os.urandom(_NONCE_BYTES), os.urandom(_NONCE_BYTES)
        end = block.nbytes + 2 * _TAG_BYTES
        cipher.encrypt_into(nonces[0], gathered(block, parts.far), _FAR, into[: size + _TAG_BYTES])
        cipher.encrypt_into(nonces[1], gathered(block, parts.near), _NEAR, into[size + _TAG_BYTES : end])
        into[end:] = b"".join(nonces).ljust(2 * (TRAILER_BYTES - _TAG_BYTES), b"\0")

    def _open_far(self, name: bytes, sealed: memoryview, into: memoryview, parts: BlockParts) -> bool:
        (begin, end), (at, _) = far_pieces(parts)
        return self._opened(name, sealed[begin:end], bytes(sealed[at : at + _NONCE_BYTES]), _FAR, (into, parts.far))

    def _open_near(self, name: bytes, sealed: memoryview, into: memoryview, parts: BlockParts) -> bool:
        (_, begin), (_, at) = far_pieces(parts)
        end = parts.block_bytes + 2 * _TAG_BYTES
        return self._opened(name, sealed[begin:end], bytes(sealed[at : at + _NONCE_BYTES]), _NEAR, (into, parts.near))

    def _opened(
        self, name: bytes, sealed: memoryview, nonce: bytes, part: bytes, to: tuple[memoryview, Pieces]
    ) -> bool:
        """Opens a part into pieces of a buffer; False, and zeros there, unless it is that part."""
        pieces = [to[0][begin:end] for begin, end in to[1]]
        text = pieces[0] if len(pieces) == 1 else memoryview(bytearray(sealed.nbytes - _TAG_BYTES))
        try:
            self._cipher(name).decrypt_into(nonce, sealed, part, text)
        except _invalid():
            for piece in pieces:
                piece[:] = bytes(piece.nbytes)
            return False
        if len(pieces) > 1:
            at = 0
            for piece in pieces:
                copy_bytes(piece, text[at : at + piece.nbytes])
                at += piece.nbytes
        return True

    def _cipher(self, name: bytes) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(hmac.digest(self._key, name, "sha256"))


def far_size(parts: BlockParts) -> int:
    """Bytes of the far part, before it is sealed."""
    return sum(end - begin for begin, end in parts.far)


def far_pieces(parts: BlockParts) -> list[tuple[int, int]]:
    """(Begin, end) of what is needed of a sealed block to open its far part: that and its tag, and its nonce."""
    end = parts.block_bytes + 2 * _TAG_BYTES
    return [(0, far_size(parts) + _TAG_BYTES), (end, end + _NONCE_BYTES)]


def gathered(block: memoryview, pieces: Pieces) -> memoryview | bytes:
    """These pieces of a block, one behind the other; no copy where it is one."""
    found = [block[begin:end] for begin, end in pieces]
    return found[0] if len(found) == 1 else b"".join(found)


def _invalid() -> type[Exception]:
    from cryptography.exceptions import InvalidTag

    return InvalidTag
