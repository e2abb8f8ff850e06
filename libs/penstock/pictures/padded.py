"""Makes a picture smaller and pads it to whole cells as Kimi K2.5's image processor does (transformers,
`image_processing_kimi_k25`): never larger, in its proportions, at the top left, black beside it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.checkpoint import PaddedForm
from penstock.pictures.picture import Grid, Picture, picture_of

if TYPE_CHECKING:
    from PIL.Image import Image

PAD = "<|media_pad|>"
"""The token in whose places embeddings stand; the chat template writes one for each picture."""


def padded(image: Image, form: PaddedForm) -> Picture:
    """An RGB image, scaled and padded. Holds Python's lock only now and then; runs in any thread."""
    import numpy as np
    from PIL.Image import Resampling

    width, height = scaled_size(image.width, image.height, form)
    grid = Grid(-(-height // form.side), -(-width // form.side))
    pixels = np.zeros((*form.shape(*grid), 3), np.uint8)
    pixels[0, :height, :width] = np.asarray(image.resize((width, height), Resampling.BICUBIC), np.uint8)
    return picture_of(grid, form.side, pixels)


def scaled_size(width: int, height: int, form: PaddedForm) -> tuple[int, int]:
    """Width and height of a picture of that size once it is no larger than it may be."""
    patch, most = form.patch, form.most_along * form.patch
    patches = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(form.most_patches / patches), most / height, most / width)
    return min(max(1, int(width * scale)), most), min(max(1, int(height * scale)), most)
