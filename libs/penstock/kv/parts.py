"""Parts of a block, for models with layers that forget.

Some layers look at everything that came before, others at a window that slides or at a chunk of the text (the *reach*).
What the latter keep of a token is of use only as long as the rows that are computed can see it. So a block has two
parts: the *far part* is what layers that look at everything keep, the *near part* all else. Of a long prefix nobody
needs the near parts but those of the last blocks.

A block stays one piece: it is there as a whole or not at all, and has one checksum. Behind its bytes stands its *mark*,
16 bytes: the checksum of the far part and of the block's name. So a reader of the far part alone finds out whether it
is right, and whether it is this block's, without the other bytes::

    0             the block as it lies in a page
    block_bytes   mark

Stores, disks and the ways between them see bytes and a layout of its own name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import xxhash

from penstock.kv.bytes.checksum import CHECKSUM_BYTES
from penstock.kv.bytes.copying import copy_bytes
from penstock.kv.identity import KEY_BYTES
from penstock.kv.spec import KvSpec

PARTED_LAYOUT = "+far"
"""Ends the layout of blocks with a mark: they are never taken for others."""
MARK_BYTES = CHECKSUM_BYTES
_FAR = b"far"


@dataclass(frozen=True, slots=True)
class Reach:
    """How far the layers that forget look."""

    tokens: int
    """Of the widest window, its row included, or of a chunk."""
    chunked: bool = False
    """The text is cut into chunks of so many tokens, and a row looks at its own one."""

    def first(self, position: int) -> int:
        """The first position that a row at `position` looks at."""
        return position - position % self.tokens if self.chunked else max(0, position - self.tokens + 1)

    def far(self, blocks: int, block_size: int) -> int:
        """Of a prefix of so many blocks, the leading ones of which the far part is enough, even when the prefix's last
        token is computed once more."""
        return self.first(blocks * block_size - 1) // block_size if blocks else 0

    def usable(self, whole: Sequence[bool], block_size: int) -> int:
        """The longest prefix of these blocks on which a text can go on; `whole` says of each whether its near part is
        there."""
        gaps = self.gaps(whole, block_size)
        return gaps[-1] if gaps else len(whole)

    def gaps(self, whole: Sequence[bool], block_size: int) -> list[int]:
        """Blocks whose near part is not there, because of which a text can't go on where it would look at them: from
        the last on, up to where the longest usable prefix ends. As long as they lack it no longer one is usable,
        whatever comes of the others."""
        found, end = list[int](), len(whole)
        while (lacking := first_false(whole, self.far(end, block_size), end)) < end:
            found.append(lacking)
            end = lacking
        return found


def first_false(values: Sequence[bool], begin: int, end: int) -> int:
    """The first index from `begin` on where a value is false, `end` when there is none before."""
    return next((index for index in range(begin, end) if not values[index]), end)


@dataclass(frozen=True, slots=True)
class BlockParts:
    """Where the parts of a block of one model lie."""

    block_bytes: int
    """Without the mark."""
    far: tuple[tuple[int, int], ...]
    """The far part: pieces (begin, end) that do not touch, in order."""
    reach: Reach

    @property
    def near(self) -> list[tuple[int, int]]:
        """All other pieces, in order."""
        begins = [0, *(end for _, end in self.far)]
        ends = [*(begin for begin, _ in self.far), self.block_bytes]
        return [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]

    @property
    def wanted(self) -> list[tuple[int, int]]:
        """What is read of a block whose far part is enough: that, and the mark."""
        return [*self.far, (self.block_bytes, self.block_bytes + MARK_BYTES)]

    @property
    def far_bytes(self) -> int:
        """Of what is read then."""
        return sum(end - begin for begin, end in self.wanted)

    def mark(self, key: bytes, block: memoryview) -> bytes:
        """The mark of a block, of which only the far part is looked at."""
        digest = xxhash.xxh3_128(key)
        for begin, end in self.far:
            digest.update(block[begin:end])
        return digest.digest()

    def marked(self, key: bytes, block: memoryview) -> bool:
        """Whether the far part of a block, behind which its mark stands, is that of the block with this key."""
        return self.mark(key, block) == block[self.block_bytes : self.block_bytes + MARK_BYTES]

    def copy(self, into: memoryview, block: memoryview) -> None:
        """Copies the far part; the rest of `into` stays as it is."""
        for begin, end in self.far:
            copy_bytes(into[begin:end], block[begin:end])


def parted(spec: KvSpec) -> KvSpec:
    """The spec of such blocks with their marks."""
    return replace(spec, layout=spec.layout + PARTED_LAYOUT, block_bytes=spec.block_bytes + MARK_BYTES)


def far_key(key: bytes) -> bytes:
    """Names the far part of a block, where it is without the rest: in a worker's pages."""
    return key + _FAR


def is_far_key(key: bytes) -> bool:
    """Whether it is one of `far_key`."""
    return len(key) == KEY_BYTES + len(_FAR)


def whole_key(key: bytes) -> bytes:
    """The block's key, of that or of `far_key`."""
    return key[:KEY_BYTES]
