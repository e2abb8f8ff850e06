"""What a slab file looks like. Pure: bytes in, headers out.

A slab is a row of slots of equal size. A slot is a header page and the block's bytes, rounded up to whole pages::

    0      header: see `Header`; then the checksum of the header; zeros to the end of the page
    4096   the block
    ...    zeros to the end of the slot

A slot is written in two steps, the block together with an empty header first, then the header. So whatever moment
the writer is killed at, the slot is empty or whole. A machine that loses power may keep the second step and lose
the first; then the checksum of the block does not match, which every read verifies.

The header names everything that makes the block this block: its full key, which stands for the tenant, the model
and every token up to here, and the fingerprint of the spec. A slot that was moved, copied or swapped with another
is therefore still right or refused, never wrong.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, fields
from enum import Enum

from penstock.kv.bytes.checksum import CHECKSUM_BYTES, checksum
from penstock.kv.spec import KvSpec

PAGE = 4096
VERSION = 1
_MAGIC = b"penstokN"
_TAG = b"penstock slab v1"
_FIELDS = struct.Struct("<8sII32s32s32s16s16sIIQQdId")
_HEADER_BYTES = _FIELDS.size + CHECKSUM_BYTES
_EMPTY = bytes(len(_MAGIC))
_MOST_USES = 2**32 - 1


class Drop(Enum):
    """Why a slot, or a file, was not used."""

    TORN = "torn"
    """The header is not whole, or the file ends before the slot does."""
    CORRUPT = "corrupt"
    """The block does not match its checksum, or is another than the one asked for."""
    UNREADABLE = "unreadable"
    """The disk does not give its bytes."""
    STALE = "stale"
    """Another slot has a later writing of the same block."""
    FOREIGN = "foreign"
    """Of another spec, version or size, or not one of our files."""


@dataclass(frozen=True, slots=True)
class Header:
    """The description of a block in its slot."""

    key: bytes
    parent: bytes
    checksum: bytes
    """Of the block's bytes."""
    namespace: bytes
    """The tenant's, 16 bytes; zeros: unknown."""
    first_token: int
    tokens: int
    length: int
    """Bytes of the block."""
    sequence: int
    """Grows with every writing into any slot of the directory."""
    seconds: float
    """What computing the block took; 0: unknown."""
    uses: int
    """How often it had been used when it was written."""
    retained_until: float = 0.0
    """When it was written it was promised to stay until then: seconds since 1970; 0: it was not."""


def round_up(size: int) -> int:
    """To whole pages."""
    return -(-size // PAGE) * PAGE


def slot_bytes(block_bytes: int) -> int:
    """The bytes that one block takes on the disk."""
    return PAGE + round_up(block_bytes)


def fingerprint(spec: KvSpec) -> bytes:
    """32 bytes that name a spec and this format; anything else is foreign."""
    digest = hashlib.sha256(_TAG)
    for field in fields(spec):
        for piece in (field.name.encode(), str(getattr(spec, field.name)).encode()):
            digest.update(len(piece).to_bytes(4, "little"))
            digest.update(piece)
    return digest.digest()


def pack(header: Header, mark: bytes) -> bytes:
    """A header page; `mark` is the fingerprint."""
    data = _FIELDS.pack(
        _MAGIC,
        VERSION,
        PAGE,
        mark,
        header.key,
        header.parent,
        header.checksum,
        header.namespace.ljust(16, b"\0"),
        header.first_token,
        header.tokens,
        header.length,
        header.sequence,
        header.seconds,
        min(header.uses, _MOST_USES),
        header.retained_until,
    )
    return (data + checksum(data)).ljust(PAGE, b"\0")


def parse(page: bytes | bytearray | memoryview, mark: bytes, length: int) -> Header | Drop | None:
    """The header in a page of a slab of the spec `mark` with blocks of `length` bytes. None: the slot is empty."""
    data = bytes(page[:_HEADER_BYTES])
    if len(data) < _HEADER_BYTES:
        return Drop.TORN
    if data.startswith(_EMPTY):
        return None
    magic, version, unit, found, *rest = _FIELDS.unpack_from(data)
    if magic != _MAGIC or checksum(data[: _FIELDS.size]) != data[_FIELDS.size :]:
        return Drop.TORN
    if (version, unit, found) != (VERSION, PAGE, mark):
        return Drop.FOREIGN
    header = Header(*rest)
    return header if header.length == length else Drop.FOREIGN
