"""Which way a model sees pictures, and whether all is there that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from penstock.checkpoint.files import Json
from penstock.checkpoint.pictures.form import PictureForm, PicturePart
from penstock.checkpoint.pictures.padded import padded_form
from penstock.checkpoint.pictures.patches import patch_form
from penstock.checkpoint.pictures.tiles import tile_form
from penstock.checkpoint.tensors import DTYPE_BYTES, TensorInfo

_WAYS: Mapping[str, Callable[[Path, Json], PictureForm | str]] = {
    "KimiK25ForConditionalGeneration": padded_form,
    "Kimi_K25ForConditionalGeneration": padded_form,
    "Llama4ForConditionalGeneration": tile_form,
    "Qwen2_5_VLForConditionalGeneration": patch_form,
}


def picture_part(
    config_file: Path, values: Json, tensors: Mapping[str, TensorInfo], text_width: int
) -> PicturePart | str:
    """The picture part of a checkpoint, whose config.json has `values` and whose files have `tensors`; a text: why it
    is served without pictures. Raises CheckpointError for a field that no model can have."""
    form = _form(config_file, values)
    if isinstance(form, str):
        return form
    own = {name.removeprefix("model."): info for name, info in tensors.items()}
    needed = form.tensors(text_width)
    for name, shape in needed.items():
        if name not in own:
            return f"tensor {name} is missing"
        if own[name].dtype not in DTYPE_BYTES:
            return f"tensor {name} is {own[name].dtype}; pictures need {', '.join(DTYPE_BYTES)}"
        if own[name].shape != shape:
            return f"tensor {name} has shape {list(own[name].shape)}, config.json makes it {list(shape)}"
    return PicturePart(form, {name: own[name] for name in needed})


def picture_form(directory: Path, values: Json) -> PictureForm | None:
    """The form alone, without a look at the weights. Raises CheckpointError."""
    form = _form(directory / "config.json", values)
    return None if isinstance(form, str) else form


def _form(config_file: Path, values: Json) -> PictureForm | str:
    ways = [way for name, way in _WAYS.items() if values.get("architectures") == [name]]
    return ways[0](config_file, values) if ways else f"pictures are served for {', '.join(_WAYS)}"
