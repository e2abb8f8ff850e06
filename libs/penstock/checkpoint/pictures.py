"""How a model sees pictures, from config.json and the tensors that are there; Llama 4's way.

A picture is cut into square tiles, each of them into patches; a vision transformer computes the patches of a tile, four
neighbours become one (pixel shuffle), and a projection makes them embeddings of the text model, which stand in the
places of tokens of their own. Source: the config fields and tensors of published Llama 4 checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.errors import CheckpointError
from penstock.checkpoint.files import Json, read_object_if_there
from penstock.checkpoint.reading import Reader
from penstock.checkpoint.tensors import DTYPE_BYTES, TensorInfo

PATCHES = "vision_model.patch_embedding.linear.weight"
CLASS = "vision_model.class_embedding"
POSITIONS = "vision_model.positional_embedding_vlm"
PROJECTION = "multi_modal_projector.linear_1.weight"
_ARCHITECTURE = "Llama4ForConditionalGeneration"
_CHANNELS = 3
_MOST_TILES = 64
_MOST_LAYERS = 1000
_LARGEST = 2048
"""Pixels of a tile's side."""
_MOST_PATCHES = 128
"""Along a side, that become one embedding or are of one tile."""
_IMAGE_TOKEN = 200092


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureForm:
    """How a model sees pictures. Sizes are pixels, or numbers of a vector."""

    tile: int
    """Side of a tile."""
    patch: int
    """Side of a patch."""
    shuffle: int
    """So many patches in each direction become one embedding."""
    most_tiles: int
    """Of a picture, without the one that shows all of it."""
    token: int
    """In whose places embeddings stand."""
    hidden_size: int
    n_layers: int
    n_heads: int
    intermediate_size: int
    projected: int
    """Width of what is projected to the text model's."""
    rope_theta: float

    @property
    def patches(self) -> int:
        """Along a side of a tile."""
        return self.tile // self.patch

    @property
    def embeddings(self) -> int:
        """Of a tile: so many tokens."""
        return (self.patches // self.shuffle) ** 2

    @property
    def tile_bytes(self) -> int:
        """Of its pixels."""
        return self.tile * self.tile * _CHANNELS

    def tensors(self, text_width: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the picture part."""
        hidden, inner = self.hidden_size, self.intermediate_size
        needed: dict[str, tuple[int, ...]] = {
            PATCHES: (hidden, _CHANNELS * self.patch * self.patch),
            CLASS: (hidden,),
            POSITIONS: (self.patches**2 + 1, hidden),
            "vision_model.vision_adapter.mlp.fc1.weight": (self.projected, inner),
            "vision_model.vision_adapter.mlp.fc2.weight": (self.projected, self.projected),
            PROJECTION: (text_width, self.projected),
        }
        for norm in ("layernorm_pre", "layernorm_post"):
            needed |= _with_bias(f"vision_model.{norm}", (hidden,))
        for layer in range(self.n_layers):
            prefix = f"vision_model.model.layers.{layer}."
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                needed |= _with_bias(f"{prefix}self_attn.{name}", (hidden, hidden))
            needed |= _with_bias(f"{prefix}mlp.fc1", (inner, hidden))
            needed |= _with_bias(f"{prefix}mlp.fc2", (hidden, inner))
            needed |= _with_bias(f"{prefix}input_layernorm", (hidden,))
            needed |= _with_bias(f"{prefix}post_attention_layernorm", (hidden,))
        return needed


def _with_bias(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


@dataclass(frozen=True, slots=True)
class PicturePart:
    """What a checkpoint has for pictures."""

    form: PictureForm
    tensors: Mapping[str, TensorInfo]
    """By the names of `PictureForm.tensors`."""


def picture_part(
    config_file: Path, values: Json, tensors: Mapping[str, TensorInfo], text_width: int
) -> PicturePart | str:
    """The picture part of a checkpoint, whose config.json has `values` and whose files have `tensors`; a text: why it
    is served without pictures. Raises CheckpointError for a field that no model can have."""
    if values.get("architectures") != [_ARCHITECTURE]:
        return "pictures are served for Llama 4"
    form = _form(config_file, values)
    if isinstance(form, str):
        return form
    if form.n_layers > len(tensors):  # known before the names of millions are made
        return f"vision_config.num_hidden_layers {form.n_layers} is more than there are tensors"
    own = {name.removeprefix("model."): info for name, info in tensors.items()}
    for name, shape in form.tensors(text_width).items():
        if name not in own:
            return f"tensor {name} is missing"
        if own[name].dtype not in DTYPE_BYTES:
            return f"tensor {name} is {own[name].dtype}; pictures need {', '.join(DTYPE_BYTES)}"
        if own[name].shape != shape:
            return f"tensor {name} has shape {list(own[name].shape)}, config.json makes it {list(shape)}"
    return PicturePart(form, {name: own[name] for name in form.tensors(text_width)})


def picture_form(directory: Path, values: Json) -> PictureForm | None:
    """The form alone, without a look at the weights. Raises CheckpointError."""
    if values.get("architectures") != [_ARCHITECTURE]:
        return None
    form = _form(directory / "config.json", values)
    return None if isinstance(form, str) else form


def _form(config_file: Path, values: Json) -> PictureForm | str:
    vision = values.get("vision_config")
    if not isinstance(vision, dict):
        return "config.json has no vision_config"
    read = Reader(config_file, vision)
    tile, patch = read.integer("image_size", 448), read.integer("patch_size", 14)
    hidden, heads = read.integer("hidden_size", 768), read.integer("num_attention_heads", 16)
    ratio = read.number("pixel_shuffle_ratio", 0.5)
    shuffle = round(1 / max(ratio, 1 / _MOST_PATCHES))
    inner, projected = read.integer("intermediate_size", 5632), read.integer("projector_output_dim", 4096)
    if abs(shuffle * ratio - 1) > 1e-9:
        return f"vision_config.pixel_shuffle_ratio {ratio:g} is not one over a whole number"
    if tile > _LARGEST or tile // patch > _MOST_PATCHES:
        return f"vision_config.image_size {tile} is more than {_LARGEST}, or than {_MOST_PATCHES} patches of {patch}"
    if tile % (patch * shuffle):
        return f"vision_config.image_size {tile} is not a multiple of {patch * shuffle}"
    if (layers := read.integer("num_hidden_layers", 34)) > _MOST_LAYERS:
        return f"vision_config.num_hidden_layers {layers} is more than {_MOST_LAYERS}"
    if hidden % heads or hidden // heads % 4:
        return f"vision_config.hidden_size {hidden} is not a multiple of 4 for each of {heads} heads"
    if inner != hidden * shuffle * shuffle:
        return f"vision_config.intermediate_size {inner} is not that of {shuffle * shuffle} patches of {hidden}"
    for name, default in (("projector_input_dim", 4096), ("vision_output_dim", 7680)):
        if (found := read.integer(name, default)) != projected:
            return f"vision_config.{name} {found} is not projector_output_dim {projected}"
    if vision.get("hidden_act", "gelu") != "gelu":
        return f"vision_config.hidden_act {vision['hidden_act']!r} is not gelu"
    rope = vision.get("rope_parameters") or {}
    theta = Reader(config_file, {**vision, **rope} if isinstance(rope, dict) else vision).number("rope_theta", 10000.0)
    if values.get("multi_modal_projector_bias") or vision.get("multi_modal_projector_bias"):
        return "vision_config.multi_modal_projector_bias is not served"
    how_file = config_file.parent / "preprocessor_config.json"
    how = Reader(how_file, read_object_if_there(how_file))
    if how.flag("resize_to_max_canvas", False):
        return "preprocessor_config.json: resize_to_max_canvas is not served"
    most = how.integer("max_patches", 16)
    if most > _MOST_TILES:
        raise CheckpointError(how_file, f"max_patches {most}: must be at most {_MOST_TILES}")
    return PictureForm(
        tile=tile,
        patch=patch,
        shuffle=shuffle,
        most_tiles=most,
        token=Reader(config_file, values).integer("image_token_index", _IMAGE_TOKEN),
        hidden_size=hidden,
        n_layers=layers,
        n_heads=heads,
        intermediate_size=inner,
        projected=projected,
        rope_theta=theta,
    )
