"""Scales a picture to whole cells as Qwen2-VL's image processor does (transformers, `image_processing_qwen2_vl`): each
side to the nearest number of cells, and where that is too many or too few pixels, both in proportion."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.checkpoint import PatchForm
from penstock.pictures.picture import Grid, Picture, picture_of

if TYPE_CHECKING:
    from PIL.Image import Image

PATCH = "<|image_pad|>"
"""The token in whose places embeddings stand; the chat template writes one for each picture."""
LONGEST = 200
"""Times as long as the other that one side of a picture may be."""


def patched(image: Image, form: PatchForm) -> Picture:
    """An RGB image, none of whose sides is longer than LONGEST allows, scaled. Holds Python's lock only now and then;
    runs in any thread."""
    import numpy as np
    from PIL.Image import Resampling

    grid = cells(image.width, image.height, form)
    size = grid.columns * form.side, grid.rows * form.side
    pixels = np.array(image.resize(size, Resampling.BICUBIC), np.uint8)
    return picture_of(grid, form.side, pixels[np.newaxis])


def cells(width: int, height: int, form: PatchForm) -> Grid:
    """The grid of a picture of that size."""
    side, area = form.side, width * height
    rows, columns = round(height / side), round(width / side)  # halves to the even number, as the image processor does
    if rows * columns * side**2 > form.most_pixels:
        shrink = math.sqrt(area / form.most_pixels)
        return Grid(max(1, math.floor(height / shrink / side)), max(1, math.floor(width / shrink / side)))
    if rows * columns * side**2 < form.least_pixels:
        grow = math.sqrt(form.least_pixels / area)
        return Grid(math.ceil(height * grow / side), math.ceil(width * grow / side))
    return Grid(rows, columns)
