"""A picture as a model sees it, and its place in a prompt."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from penstock.kv.identity import PictureSpan

if TYPE_CHECKING:  # numpy is not for those who only read texts
    import numpy as np
    import numpy.typing as npt

    from penstock.checkpoint import PictureForm

    Pixels = npt.NDArray[np.uint8]
    """[parts, from top to bottom, across, 3]: red, green and blue of each pixel."""

_TAG = b"penstock picture v1"
_HEAD = struct.Struct("<III")
GRID = struct.Struct("!II")
"""Rows and columns, as one process tells another."""


class Grid(NamedTuple):
    """The cells of a picture, see PictureForm."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture, scaled and cut. Two are equal when a model sees the same."""

    grid: Grid
    side: int
    """Of a cell, pixels."""
    digest: bytes
    """sha256 over the grid, the side of a cell, and the pixels."""
    pixels: Pixels = field(compare=False, repr=False)
    """Tiles row by row and then the one that shows all of it; or all in one part."""


def picture_of(grid: Grid, side: int, pixels: Pixels) -> Picture:
    """The picture of these pixels, which lie in one piece and nobody changes any more."""
    digest = hashlib.sha256(_TAG + _HEAD.pack(*grid, side))
    digest.update(pixels.data)
    return Picture(grid, side, digest.digest(), pixels)


def picture_from(form: PictureForm, grid: Grid, content: bytes | bytearray | memoryview) -> Picture:
    """The picture whose pixels are `content`; raises ValueError when these are of another size."""
    import numpy as np

    pixels = np.frombuffer(content, np.uint8).reshape(*form.shape(*grid), 3)
    return picture_of(grid, form.side, pixels)


def pixel_bytes(form: PictureForm, grid: Grid) -> int:
    """Of the pixels of a picture in that grid."""
    return math.prod(form.shape(*grid)) * 3


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
