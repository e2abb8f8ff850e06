"""Llama 4's way to see pictures, from config.json.

A picture is cut into square tiles, each of them into patches; a vision transformer computes the patches of a tile, four
neighbours become one (pixel shuffle), and a projection makes them embeddings of the text model, which stand in the
places of tokens of their own. Source: the config fields and tensors of published Llama 4 checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.errors import CheckpointError
from penstock.checkpoint.files import Json, read_object_if_there
from penstock.checkpoint.pictures.cells import rope_theta, with_bias
from penstock.checkpoint.reading import Reader

PATCHES = "vision_model.patch_embedding.linear.weight"
CLASS = "vision_model.class_embedding"
POSITIONS = "vision_model.positional_embedding_vlm"
PROJECTION = "multi_modal_projector.linear_1.weight"
_CHANNELS = 3
_MOST_TILES = 64
_MOST_LAYERS = 1000
_LARGEST = 2048
"""Pixels of a tile's side."""
_MOST_PATCHES = 128
"""Along a side, that become one embedding or are of one tile."""
_IMAGE_TOKEN = 200092


@dataclass(frozen=True, slots=True, kw_only=True)
class TileForm:
    """PictureForm of square tiles. Sizes are pixels, or numbers of a vector."""

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
    def side(self) -> int:
        """That of a tile."""
        return self.tile

    @property
    def spatial(self) -> bool:
        """Embeddings stand one behind the other, as tokens do."""
        return False

    def embeddings(self, rows: int, columns: int) -> int:
        """Of a tile: so many tokens."""
        return (self.patches // self.shuffle) ** 2

    def shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        """Where a grid has several tiles another one shows the whole picture."""
        tiles = rows * columns
        return tiles + 1 if tiles > 1 else 1, self.tile, self.tile

    def complaint(self, rows: int, columns: int) -> str:
        """See PictureForm."""
        if 0 < rows * columns <= self.most_tiles:
            return ""
        return f"{rows} x {columns} tiles are not 1 to {self.most_tiles}"

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
            needed |= with_bias(f"vision_model.{norm}", (hidden,))
        for layer in range(self.n_layers):
            prefix = f"vision_model.model.layers.{layer}."
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                needed |= with_bias(f"{prefix}self_attn.{name}", (hidden, hidden))
            needed |= with_bias(f"{prefix}mlp.fc1", (inner, hidden))
            needed |= with_bias(f"{prefix}mlp.fc2", (hidden, inner))
            needed |= with_bias(f"{prefix}input_layernorm", (hidden,))
            needed |= with_bias(f"{prefix}post_attention_layernorm", (hidden,))
        return needed


def tile_form(config_file: Path, values: Json) -> TileForm | str:
    """A text: why the model is served without pictures. Raises CheckpointError."""
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
    if values.get("multi_modal_projector_bias") or vision.get("multi_modal_projector_bias"):
        return "vision_config.multi_modal_projector_bias is not served"
    how_file = config_file.parent / "preprocessor_config.json"
    how = Reader(how_file, read_object_if_there(how_file))
    if how.flag("resize_to_max_canvas", False):
        return "preprocessor_config.json: resize_to_max_canvas is not served"
    most = how.integer("max_patches", 16)
    if most > _MOST_TILES:
        raise CheckpointError(how_file, f"max_patches {most}: must be at most {_MOST_TILES}")
    return TileForm(
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
        rope_theta=rope_theta(read),
    )
