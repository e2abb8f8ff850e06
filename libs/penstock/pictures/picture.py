"""A picture as a model sees it, and its place in a prompt."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from penstock.kv.identity import PictureSpan

if TYPE_CHECKING:  # numpy is not for those who only read texts
    import numpy as np
    import numpy.typing as npt

    Pixels = npt.NDArray[np.uint8]
    """[tiles, side, side, 3]: red, green and blue of each pixel."""

_TAG = b"penstock picture v1"
_HEAD = struct.Struct("<III")
GRID = struct.Struct("!II")
"""Rows and columns, as one process tells another."""


class Grid(NamedTuple):
    """How a picture is cut."""

    rows: int
    columns: int

    @property
    def tiles(self) -> int:
        """With the one that shows all of it, where there is more than that."""
        parts = self.rows * self.columns
        return parts + 1 if parts > 1 else 1


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture, cut into tiles. Two are equal when a model sees the same."""

    grid: Grid
    digest: bytes
    """sha256 over the grid, the side of a tile, and the pixels."""
    pixels: Pixels = field(compare=False, repr=False)
    """Row by row, and then the tile that shows all of it."""


def picture_of(grid: Grid, pixels: Pixels) -> Picture:
    """The picture of these tiles, which lie in one piece and nobody changes any more."""
    digest = hashlib.sha256(_TAG + _HEAD.pack(*grid, pixels.shape[1]))
    digest.update(pixels.data)
    return Picture(grid, digest.digest(), pixels)


def picture_from(grid: Grid, side: int, content: bytes | bytearray | memoryview) -> Picture:
    """The picture whose pixels are `content`; raises ValueError when these are of another size."""
    import numpy as np

    shape = (grid.tiles, side, side, 3)
    return picture_of(grid, np.frombuffer(content, np.uint8).reshape(shape))


@dataclass(frozen=True, slots=True)
class ShownPicture:
    """A picture in a prompt."""

    picture: Picture
    first: int
    """Position of its first token."""
    count: int
    """Its tokens, those that stand around its embeddings among them."""


def spans(shown: Sequence[ShownPicture]) -> tuple[PictureSpan, ...]:
    """As block keys cover them."""
    return tuple(PictureSpan(one.first, one.first + one.count, one.picture.digest) for one in shown)
