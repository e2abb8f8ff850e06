"""Sealed blocks: what stores, disks and the ways between them hold of a tenant's KV can be read and made by nobody but
the workers that serve a request of this tenant.

A sealed block is the block encrypted and authenticated, and behind it what is needed to open it::

    0             ciphertext, as long as the block
    block_bytes   tag, 16 bytes
    + 16          nonce, 12 random bytes
    + 28          zeros, 4 bytes

with AES-256-GCM (NIST SP 800-38D). Each block has a key of its own, derived from the tenant's and from the block's name
(HMAC, RFC 2104), so nonces meet only where one block is sealed often, and a block that was moved under another name
does not open. The checksum that a store asks for is that of the sealed bytes: it can tell a torn block from a whole
one, and a forged one it can't, which is for readers to find.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from penstock.kv.spec import KvSpec
from penstock.runtime.config import ConfigError

SEAL_KEY_BYTES = 32
SEALED_LAYOUT = "+aes256gcm"
"""Ends the layout of sealed blocks: they are never taken for others."""
TRAILER_BYTES = 32
_TAG_BYTES = 16
_NONCE_BYTES = 12
_PURPOSE = b"penstock block seal v1"


def seal_key(server_key: bytes, tenant: str) -> bytes:
    """The key of one tenant's blocks, which only who has the server key can produce."""
    return hmac.digest(server_key, _PURPOSE + tenant.encode(), "sha256")


def sealed(spec: KvSpec) -> KvSpec:
    """The spec of such blocks once they are sealed."""
    return replace(spec, layout=spec.layout + SEALED_LAYOUT, block_bytes=spec.block_bytes + TRAILER_BYTES)


def is_sealed(spec: KvSpec) -> bool:
    """Whether a spec is that of sealed blocks."""
    return spec.layout.endswith(SEALED_LAYOUT)


def check_seal(seal: bool) -> None:
    """Raises ConfigError for a setting of that name that can't be had here."""
    if seal and find_spec("cryptography") is None:
        raise ConfigError("seal", "true", "needs the package cryptography: pip install 'cryptography>=50'")


class Seal:
    """Seals and opens the blocks of one tenant. Thread-safe; the interpreter lock is not held while bytes are worked
    on."""

    def __init__(self, key: bytes) -> None:
        """`key` is that of `seal_key`."""
        self._key = key

    def close(self, name: bytes, block: memoryview, into: memoryview) -> None:
        """Seals the block with this key into a buffer of its size and TRAILER_BYTES, in one pass."""
        size = block.nbytes
        nonce = os.urandom(_NONCE_BYTES)
        self._cipher(name).encrypt_into(nonce, block, None, into[: size + _TAG_BYTES])
        into[size + _TAG_BYTES :] = nonce + bytes(TRAILER_BYTES - _TAG_BYTES - _NONCE_BYTES)

    def open(self, name: bytes, sealed: memoryview, into: memoryview) -> bool:
        """Opens a sealed block into a buffer of the block's size, in one pass; False, and nothing of it there, unless
        it is the block of this name that a holder of the key has sealed."""
        size = into.nbytes
        nonce = bytes(sealed[size + _TAG_BYTES : size + _TAG_BYTES + _NONCE_BYTES])
        try:
            self._cipher(name).decrypt_into(nonce, sealed[: size + _TAG_BYTES], None, into)
        except _invalid():
            into[:] = bytes(size)
            return False
        return True

    def _cipher(self, name: bytes) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(hmac.digest(self._key, name, "sha256"))


def _invalid() -> type[Exception]:
    from cryptography.exceptions import InvalidTag

    return InvalidTag
