"""How a picture is made smaller and padded: a plain reading of Kimi K2.5's rule, and pixels that torch has scaled."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional

from penstock.checkpoint import CheckpointError, PaddedForm, picture_form
from penstock.pictures.padded import padded, scaled_size
from penstock.pictures.picture import Grid
from penstock.pictures.seeing import seen, texts_of, tokens_of

PUBLISHED = {
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "patch_size": 14,
    "pos_emb_type": "divided_fixed",
    "projector_ln_eps": 1e-05,
    "vt_hidden_size": 1152,
    "vt_intermediate_size": 4304,
    "vt_num_attention_heads": 16,
    "vt_num_hidden_layers": 27,
}
"""The fields of published checkpoints that matter here."""


def form(tmp_path, how=None, **vision) -> PaddedForm:
    """Of a config.json, beside which the preprocessor's is `how`."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(how or {}))
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "media_placeholder_token_id": 163605}
    return picture_form(tmp_path, {**config, "vision_config": {**PUBLISHED, **vision}})


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    how = {"media_proc_cfg": {"in_patch_limit": 60, "patch_limit_on_one_side": 12, "patch_size": 14}}
    return form(tmp_path_factory.mktemp("kimi"), how)


def test_the_published_fields(tmp_path):
    found = form(tmp_path)
    assert (found.hidden_size, found.n_layers, found.n_heads, found.intermediate_size) == (1152, 27, 16, 4304)
    assert (found.most_patches, found.most_along, found.places, found.token) == (16384, 512, (64, 64), 163605)
    assert (found.side, found.mean, found.deviation) == (28, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    shapes = found.tensors(7168)
    assert shapes["mm_projector.proj.0.weight"] == (4608, 4608) and shapes["mm_projector.proj.2.weight"] == (7168, 4608)


@given(st.integers(1, 1500), st.integers(1, 1500))
def test_a_picture_is_made_no_larger_and_has_no_more_patches_than_it_may(own, width, height):
    across, down = scaled_size(width, height, own)
    most = 12 * 14
    fits = width <= most and height <= most and max(1, width // 14) * max(1, height // 14) <= 60
    if fits:
        assert (across, down) == (width, height)
        return
    assert 1 <= across <= min(width, most) and 1 <= down <= min(height, most)
    whole = max(1, width // 14) * max(1, height // 14)
    factor = min(1.0, math.sqrt(60 / whole), most / width, most / height)
    assert abs(across - max(1, width * factor)) < 1 and abs(down - max(1, height * factor)) < 1
    assert not own.complaint(-(-down // 28), -(-across // 28))


@pytest.mark.parametrize(("width", "height"), [(28, 28), (9, 13), (100, 61), (61, 500), (300, 300)])
def test_the_pixels_are_scaled_and_the_rest_is_black(own, width, height):
    image = Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8))
    picture = padded(image, own)
    across, down = scaled_size(width, height, own)
    assert picture.grid == (-(-down // 28), -(-across // 28))
    levels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
    scaled = functional.interpolate(levels, (down, across), mode="bicubic", antialias=True, align_corners=False)
    wanted = np.zeros(picture.pixels.shape[1:])
    wanted[:down, :across] = scaled[0].round().clamp(0, 255).permute(1, 2, 0).numpy()
    assert np.abs(picture.pixels[0].astype(int) - wanted).max() <= 1
    assert not picture.pixels[0, down:].any() and not picture.pixels[0, :, across:].any()


def test_a_picture_has_a_token_for_each_cell(own):
    assert texts_of(own) == {"whole": "<|media_pad|>", "patch": "<|media_pad|>"}
    assert tokens_of(Grid(2, 3), own, {"whole": 7, "patch": 7}) == [7] * 6
    assert seen(Image.new("RGB", (1000, 3)), own, "x").grid == (1, 6), "however long it is"


@pytest.mark.parametrize(
    ("vision", "says"),
    [
        ({"patch_size": 0}, "patch_size must be a positive integer"),
        ({"vt_hidden_size": "x"}, "vt_hidden_size must be a positive integer"),
        ({"projector_ln_eps": -1}, "projector_ln_eps must be a positive number"),
    ],
)
def test_what_no_model_can_have_is_refused_by_name(tmp_path, vision, says):
    with pytest.raises(CheckpointError, match=says):
        form(tmp_path, **vision)


@pytest.mark.parametrize(
    "vision",
    [
        {"merge_type": "other"},
        {"mm_projector_type": "mlp"},
        {"pos_emb_type": "other"},
        {"merge_kernel_size": [2, 3]},
        {"merge_kernel_size": [0, 0]},
        {"merge_kernel_size": 2},
        {"merge_kernel_size": [100, 100]},
        {"vt_num_hidden_layers": 5000},
        {"vt_hidden_size": 1156},
        {"init_pos_emb_height": 5000},
        {"hidden_act": "silu"},
    ],
)
def test_a_model_that_sees_otherwise_is_served_without_pictures(tmp_path, vision):
    assert form(tmp_path, **vision) is None


def test_bounds_hold_whatever_the_checkpoint_says(tmp_path):
    found = form(tmp_path, {"media_proc_cfg": {"in_patch_limit": 1 << 30, "patch_limit_on_one_side": 1 << 30}})
    assert (found.most_patches, found.most_along) == (1 << 16, 1 << 10)
    assert found.complaint(513, 1) and found.complaint(400, 400) and found.complaint(0, 1) and not found.complaint(9, 9)
