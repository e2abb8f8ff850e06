"""How a picture is cut, against a plain reading of Llama 4's rule: all grids, and pixels that torch has scaled."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional

from penstock.checkpoint import TileForm
from penstock.pictures.picture import Grid
from penstock.pictures.tiles import TEXTS, fitting_grid, tiled, tokens_of


def form(tile=28, most=16):
    return TileForm(
        tile=tile,
        patch=7,
        shuffle=2,
        most_tiles=most,
        token=9,
        hidden_size=16,
        n_layers=1,
        n_heads=2,
        intermediate_size=64,
        projected=16,
        rope_theta=1e4,
    )


def scale(grid, width, height, tile):
    """By how much a picture of that size fills the grid."""
    return min(Fraction(grid.rows * tile, height), Fraction(grid.columns * tile, width))


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 16))
def test_the_grid_is_the_one_that_scales_least_and_of_equals_the_smallest(width, height, most):
    every = [Grid(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
    found = fitting_grid(width, height, form(most=most))
    scales = {grid: scale(grid, width, height, 28) for grid in every}
    growing = [value for value in scales.values() if value >= 1]
    wanted = min(growing) if growing else max(scales.values())
    assert scales[found] == wanted
    assert found.rows * found.columns == min(
        grid.rows * grid.columns for grid, value in scales.items() if value == wanted
    )


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [(28, 28, (1, 1)), (10, 10, (1, 1)), (56, 28, (1, 2)), (28, 100, (4, 1)), (60, 60, (3, 3)), (500, 500, (4, 4))],
)
def test_some_grids(width, height, grid):
    assert fitting_grid(width, height, form()) == grid


def noise(width, height):
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8))


def scaled(image, width, height):
    """By torch, as torchvision does it for tensors of bytes."""
    levels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
    found = functional.interpolate(levels, (height, width), mode="bilinear", antialias=True, align_corners=False)
    return found[0].round().clamp(0, 255).permute(1, 2, 0).numpy()


@pytest.mark.parametrize(("width", "height"), [(28, 28), (9, 13), (200, 60), (61, 300), (90, 90)])
def test_the_pixels_of_tiles(width, height):
    image, own = noise(width, height), form()
    picture = tiled(image, own)
    rows, columns = picture.grid
    fits = scale(Grid(1, 1), width, height, 1)
    across, down = min(max(width, 28), columns * 28), min(max(height, 28), rows * 28)
    fits = min(Fraction(across, width), Fraction(down, height))
    inner = [max(1, int(width * fits)), max(1, int(height * fits))]
    canvas = np.zeros((rows * 28, columns * 28, 3))
    canvas[: inner[1], : inner[0]] = scaled(image, *inner)
    tiles = [
        canvas[row * 28 : row * 28 + 28, column * 28 : column * 28 + 28]
        for row in range(rows)
        for column in range(columns)
    ]
    if len(tiles) > 1:
        tiles.append(scaled(image, 28, 28))
    assert picture.pixels.shape == (len(tiles), 28, 28, 3) and form().shape(*picture.grid)[0] == len(tiles)
    assert np.abs(picture.pixels.astype(int) - np.array(tiles)).max() <= 1


def test_what_a_picture_is_named_by():
    one, again = tiled(noise(40, 40), form()), tiled(noise(40, 40), form())
    assert one == again and one.digest == again.digest and hash(one) == hash(again)
    assert tiled(noise(41, 40), form()).digest != one.digest


@pytest.mark.parametrize(
    ("grid", "wanted"),
    [
        (Grid(1, 1), "begin whole patch*4 end"),
        (Grid(1, 2), "begin patch*4 across patch*4 down whole patch*4 end"),
        (Grid(2, 1), "begin patch*4 down patch*4 down whole patch*4 end"),
    ],
)
def test_the_tokens_of_a_picture(grid, wanted):
    ids = {name: number for number, name in enumerate(TEXTS)}
    names = [name for word in wanted.split() for name in [word.split("*")[0]] * (4 if "*" in word else 1)]
    assert tokens_of(grid, form(), ids) == [ids[name] for name in names]
