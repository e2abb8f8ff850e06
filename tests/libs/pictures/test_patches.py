"""How a picture is scaled to cells, against transformers' own image processor for Qwen2-VL."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from penstock.checkpoint import CheckpointError, PatchForm, picture_form
from penstock.errors import InvalidRequest
from penstock.pictures.patches import cells, patched
from penstock.pictures.picture import Grid
from penstock.pictures.seeing import seen, texts_of, tokens_of

CONFIG = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "vision_config": {"depth": 2, "hidden_size": 16, "num_heads": 2, "fullatt_block_indexes": [1]},
}


def form(tmp_path, how=None, **vision) -> PatchForm:
    """Of a config.json, beside which the preprocessor's is `how`."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(how or {}))
    return picture_form(tmp_path, {**CONFIG, "vision_config": {**CONFIG["vision_config"], **vision}})


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return form(tmp_path_factory.mktemp("qwen"), {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 30})


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_the_cells_are_those_of_the_image_processor(own, width, height):
    if max(width, height) > 200 * min(width, height):
        return
    grid = cells(width, height, own)
    assert (grid.rows * 28, grid.columns * 28) == smart_resize(height, width, 28, own.least_pixels, own.most_pixels)
    assert not own.complaint(*grid)


@pytest.mark.parametrize(("width", "height"), [(28, 28), (9, 13), (200, 61), (61, 500), (300, 300)])
def test_the_pixels_are_those_of_the_image_processor(own, width, height):
    image = Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8))
    theirs = Qwen2VLImageProcessorPil(min_pixels=own.least_pixels, max_pixels=own.most_pixels)
    wanted = theirs(image, return_tensors="np")
    picture = patched(image, own)
    assert wanted["image_grid_thw"].tolist() == [[1, 2 * picture.grid.rows, 2 * picture.grid.columns]]
    levels = (picture.pixels[0] / 255 - own.mean) / own.deviation
    parts = levels.reshape(picture.grid.rows, 2, 14, picture.grid.columns, 2, 14, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    patches = wanted["pixel_values"].reshape(-1, 3, 2, 14, 14)
    assert (patches[:, :, 0] == patches[:, :, 1]).all()
    np.testing.assert_allclose(parts.reshape(-1, 3, 14, 14), patches[:, :, 0], atol=1e-5)


def test_a_picture_has_a_token_for_each_cell(own):
    assert texts_of(own) == {"whole": "<|image_pad|>", "patch": "<|image_pad|>"}
    assert tokens_of(Grid(2, 3), own, {"whole": 7, "patch": 7}) == [7] * 6


def test_a_picture_that_is_far_too_long_is_refused(own):
    with pytest.raises(InvalidRequest, match="x: 402 x 2 pixels: no side may be 200 times as long as the other"):
        seen(Image.new("RGB", (402, 2)), own, "x")
    assert max(seen(Image.new("RGB", (400, 2)), own, "x").grid) <= 30


@pytest.mark.parametrize(
    ("how", "vision", "says"),
    [
        ({"min_pixels": 10, "max_pixels": 5}, {}, "min_pixels 10 is more than max_pixels 5"),
        ({"image_mean": [1, 2]}, {}, "image_mean must be a list of 3 numbers"),
        ({}, {"fullatt_block_indexes": [-1]}, "fullatt_block_indexes must be a list of layer numbers below 1000"),
        ({}, {"patch_size": 0}, "patch_size must be a positive integer"),
    ],
)
def test_what_no_model_can_have_is_refused_by_name(tmp_path, how, vision, says):
    with pytest.raises(CheckpointError, match=says):
        form(tmp_path, how, **vision)


@pytest.mark.parametrize(
    ("how", "vision"),
    [
        ({"patch_size": 16}, {}),
        ({}, {"patch_size": 100}),
        ({}, {"depth": 5000}),
        ({}, {"temporal_patch_size": 99}),
        ({}, {"hidden_size": 18}),
        ({}, {"window_size": 20}),
        ({}, {"hidden_act": "gelu"}),
        ({}, {"in_channels": 4}),
    ],
)
def test_a_model_that_sees_otherwise_is_served_without_pictures(tmp_path, how, vision):
    assert form(tmp_path, how, **vision) is None


def test_the_most_pixels_are_bounded_whatever_the_checkpoint_says(tmp_path):
    found = form(tmp_path, {"size": {"shortest_edge": 3136, "longest_edge": 1 << 30}})
    assert (found.least_pixels, found.most_pixels) == (3136, 1 << 24)
    assert found.complaint(1000, 1000) and found.complaint(0, 1) and not found.complaint(100, 100)
