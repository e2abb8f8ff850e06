"""Pictures: the files that clients send, the configurations of models that see them, and what gateways name."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from google.protobuf.message import DecodeError

from penstock.checkpoint import CheckpointError, PaddedForm, PatchForm, PictureForm, TileForm, picture_form
from penstock.checkpoint.files import read_object
from penstock.errors import InvalidRequest, Unavailable
from penstock.pictures.picture import Grid, pixel_bytes
from penstock.pictures.reading import read_picture
from penstock.pictures.seeing import seen, texts_of, tokens_of
from penstock.v1 import pictures_pb2
from penstock.worker.pictures import HeldPictures
from penstock.worker.serving.picturing import PicturesService

from .contract import LOOP_S, Check, Contract, plain

TILES = TileForm(
    tile=56,
    patch=7,
    shuffle=2,
    most_tiles=4,
    token=9,
    hidden_size=16,
    n_layers=1,
    n_heads=2,
    intermediate_size=64,
    projected=16,
    rope_theta=1e4,
)
CELLS = PatchForm(
    patch=7,
    merge=2,
    frames=2,
    least_pixels=196,
    most_pixels=19600,
    window=2,
    full_layers=(1,),
    token=9,
    hidden_size=16,
    n_layers=2,
    n_heads=2,
    intermediate_size=20,
    rope_theta=1e4,
    mean=(0.5, 0.5, 0.5),
    deviation=(0.5, 0.5, 0.5),
)
PADDED = PaddedForm(
    patch=7,
    merge=2,
    most_patches=100,
    most_along=20,
    places=(5, 5),
    token=9,
    hidden_size=16,
    n_layers=1,
    n_heads=2,
    intermediate_size=20,
    rope_theta=1e4,
    projector_eps=1e-5,
    mean=(0.5, 0.5, 0.5),
    deviation=(0.5, 0.5, 0.5),
)
FORMS = (TILES, CELLS, PADDED)
KINDS = ("png", "jpeg", "webp", "gif")
_MOST_SIDES = 1 << 12
"""Of grids that a configuration is asked about."""


def _file(data: bytes) -> None:
    """As a file of each format: a picture within the bounds of both forms, or a refusal."""
    refused = 0
    for kind in KINDS:
        try:
            image = read_picture(f"data:image/{kind};base64,{base64.b64encode(data).decode()}", "x")
            _looked_at(seen(image, PADDED, "x"), PADDED)
            for form in (TILES, CELLS):
                _looked_at(seen(image, form, "x"), form)
        except InvalidRequest as error:
            assert error.message.startswith("x: ")
            refused += 1
    assert refused >= len(KINDS) - 1, "one file has one format"


def _looked_at(picture: Any, form: PictureForm) -> None:
    assert not form.complaint(*picture.grid)
    assert picture.pixels.shape == (*form.shape(*picture.grid), 3) and picture.side == form.side
    ids = {name: number for number, name in enumerate(texts_of(form))}
    places = tokens_of(picture.grid, form, ids).count(ids["patch"])
    assert places == form.shape(*picture.grid)[0] * form.embeddings(*picture.grid)


@contextmanager
def _config() -> Iterator[Check]:
    """The configuration of a model directory: a form whose numbers make sense, or none."""
    with tempfile.TemporaryDirectory() as root:
        file = Path(root) / "config.json"

        def check(data: bytes) -> None:
            file.write_bytes(data)
            form = picture_form(Path(root), read_object(file))
            if form is None:
                return
            assert form.side > 0 and form.tensors(64)
            grids = [Grid(1, 1), Grid(3, 2), Grid(_MOST_SIDES, _MOST_SIDES)]
            for grid in (grid for grid in grids if not form.complaint(*grid)):
                assert 0 < pixel_bytes(form, grid) < 1 << 32 and form.embeddings(*grid) > 0

        yield check


def _names(data: bytes) -> None:
    """What a gateway names, to a worker of each form."""
    for form in FORMS:
        engine = SimpleNamespace(checkpoint=SimpleNamespace(pictures=SimpleNamespace(form=form)), no_pictures="")
        config = SimpleNamespace(picture_bytes=1 << 20)
        worker: Any = SimpleNamespace(pictures=HeldPictures(1 << 20), engine=engine, config=config)
        try:
            _, grids = PicturesService(worker)._check(pictures_pb2.PictureNames.FromString(data))
        except (InvalidRequest, Unavailable) as error:
            assert error.message
            continue
        assert 0 < sum(pixel_bytes(form, grid) for grid in grids.values()) <= 1 << 20


CONTRACTS = (
    Contract(
        name="picture",
        opened=plain(_file),
        words=(b"\x89PNG", b"IHDR", b"IDAT", b"\xff\xd8\xff", b"\xff\xda", b"RIFF", b"WEBPVP8L", b"GIF89a", b"acTL"),
        seconds=3.0,
        mebibytes=512,
        examples=100,
    ),
    Contract(
        name="picture_config",
        opened=_config,
        refusals=(CheckpointError,),
        words=tuple(
            f'"{word}"'.encode()
            for word in (
                "vision_config", "image_size", "patch_size", "pixel_shuffle_ratio", "num_attention_heads", "depth",
                "spatial_merge_size", "window_size", "fullatt_block_indexes", "temporal_patch_size", "num_heads",
                "Llama4ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "rope_parameters",
                "KimiK25ForConditionalGeneration", "merge_kernel_size", "init_pos_emb_height", "media_proc_cfg",
            )
        ),
        seconds=10 * LOOP_S,
    ),
    Contract(
        name="picture_names",
        opened=plain(_names),
        refusals=(DecodeError,),
        words=(b"\x0a\x10", b"\x12\x26", b"\x0a\x20", b"\x10\x01", b"\x18\x02", b"\x20\x38", b"\x20\x0e", b"\xff" * 5),
        seconds=LOOP_S,
        examples=300,
    ),
)  # fmt: skip
