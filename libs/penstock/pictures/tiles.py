"""Cuts a picture into tiles as Llama 4's image processor does (transformers, `image_processing_llama4`).

Of all grids of at most so many tiles it takes the one that the picture has to be scaled least for, and the smallest of
equals. The picture keeps its proportions, is not made larger than a tile needs, and what it leaves of the grid is
black. Where the grid has several tiles another one shows the whole picture, out of proportion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from penstock.checkpoint import TileForm
from penstock.pictures.picture import Grid, Picture, picture_of

if TYPE_CHECKING:
    from PIL.Image import Image

TEXTS = {
    "begin": "<|image_start|>",
    "end": "<|image_end|>",
    "whole": "<|image|>",
    "patch": "<|patch|>",
    "across": "<|tile_x_separator|>",
    "down": "<|tile_y_separator|>",
}
"""Tokens around the embeddings of a picture. The chat template writes `whole` for each picture."""


def tiled(image: Image, form: TileForm) -> Picture:
    """The tiles of an RGB image. Holds Python's lock only now and then; runs in any thread."""
    import numpy as np
    from PIL.Image import Resampling

    grid = fitting_grid(image.width, image.height, form)
    width, height = grid.columns * form.tile, grid.rows * form.tile
    inside = _scaled(image, min(max(image.width, form.tile), width), min(max(image.height, form.tile), height))
    canvas = np.zeros((height, width, 3), np.uint8)
    drawn = np.asarray(image.resize(inside, Resampling.BILINEAR), np.uint8)
    canvas[: drawn.shape[0], : drawn.shape[1]] = drawn
    parts = canvas.reshape(grid.rows, form.tile, grid.columns, form.tile, 3).swapaxes(1, 2)
    tiles = parts.reshape(-1, form.tile, form.tile, 3)
    if len(tiles) > 1:
        whole = np.asarray(image.resize((form.tile, form.tile), Resampling.BILINEAR), np.uint8)
        tiles = np.concatenate([tiles, whole[np.newaxis]])
    return picture_of(grid, form.tile, np.ascontiguousarray(tiles))


def _scaled(image: Image, width: int, height: int) -> tuple[int, int]:
    """Width and height of the image in its own proportions, as large as fits."""
    across, down = width / image.width, height / image.height
    if across < down:
        return width, max(1, min(int(image.height * across), height))
    return max(1, min(int(image.width * down), width)), height


def fitting_grid(width: int, height: int, form: TileForm) -> Grid:
    """The grid for a picture of that size. Scales are compared in single precision, as the image processor does."""
    import numpy as np

    grids = _grids(form.most_tiles)
    sizes = np.array(grids, np.float32) * form.tile
    scales = np.minimum(sizes[:, 0] / np.float32(height), sizes[:, 1] / np.float32(width))
    growing = scales[scales >= 1]
    chosen = growing.min() if growing.size else scales.max()
    return min((grid for grid, scale in zip(grids, scales, strict=True) if scale == chosen), key=_area)


def _area(grid: Grid) -> int:
    return grid.rows * grid.columns


@lru_cache(maxsize=4)
def _grids(most: int) -> tuple[Grid, ...]:
    """All grids, those of the same proportions one behind the other: the first of equals is taken."""
    by_ratio: dict[float, list[Grid]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                by_ratio.setdefault(rows / (count // rows), []).append(Grid(rows, count // rows))
    return tuple(grid for grids in by_ratio.values() for grid in grids)


def tokens_of(grid: Grid, form: TileForm, ids: Mapping[str, int]) -> list[int]:
    """The tokens of a picture; `ids` are those of `TEXTS`, by their names there."""
    return list(_tokens(grid, [ids["patch"]] * form.embeddings(*grid), ids))


def _tokens(grid: Grid, patches: list[int], ids: Mapping[str, int]) -> Iterator[int]:
    yield ids["begin"]
    if grid.rows * grid.columns > 1:
        for _ in range(grid.rows):
            for column in range(grid.columns):
                yield from patches
                if column < grid.columns - 1:
                    yield ids["across"]
            yield ids["down"]
    yield ids["whole"]
    yield from patches
    yield ids["end"]
