"""Kimi K2.5's way to see pictures (MoonViT), from config.json.

A picture is made smaller where it has too many patches, and padded to whole cells of a few patches in each direction. A
vision transformer computes the patches of the whole picture, whose positions are learned on a grid that is stretched to
the picture's, and the patches of a cell become one embedding of the text model. Source: the config fields and tensors
of published Kimi K2.5 checkpoints; transformers, which reads them, has names of its own for some fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.files import Json, read_object_if_there
from penstock.checkpoint.pictures.cells import CellForm, levels, rope_theta, with_bias
from penstock.checkpoint.reading import Reader

EMBED = "vision_tower.patch_embed.proj"
POSITIONS = "vision_tower.patch_embed.pos_emb.weight"
BLOCKS = "vision_tower.encoder.blocks."
LAST_NORM = "vision_tower.encoder.final_layernorm"
PROJECTOR = "mm_projector."
_CHANNELS = 3
_MIDDLE = (0.5, 0.5, 0.5)
_MOST_LAYERS = 1000
_LARGEST = 128
"""Pixels of a cell's side."""
_MOST_PATCHES, _MOST_ALONG = 1 << 16, 1 << 10
"""Of a picture, and along its side."""
_MOST_PLACES = 1 << 10
"""Along a side of the grid of positions."""
_IMAGE_TOKEN = 163605
_KINDS = {"merge_type": "sd2_tpool", "mm_projector_type": "patchmerger", "pos_emb_type": "divided_fixed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedForm(CellForm):
    """PictureForm: pictures are padded to whole cells."""

    most_patches: int
    """Of a picture, before it is padded; larger ones are made smaller."""
    most_along: int
    """Likewise along each side."""
    places: tuple[int, int]
    """Rows and columns of the learned positions."""
    projector_eps: float

    @property
    def spatial(self) -> bool:
        """Embeddings stand one behind the other, as tokens do."""
        return False

    def complaint(self, rows: int, columns: int) -> str:
        """See PictureForm. What is padded is less than a cell; and how much smaller a picture is made is found from its
        whole patches alone, so a picture of hardly two has nearly twice as many in each direction."""
        along = -(-self.most_along // self.merge)
        inside = max(rows - 1, 1) * max(columns - 1, 1) * self.merge**2
        if 0 < rows <= along and 0 < columns <= along and inside <= max(4 * self.most_patches, self.merge**2):
            return ""
        most = f"{self.most_patches} patches, {self.most_along} along a side"
        return f"{rows} x {columns} cells of {self.merge} x {self.merge} patches are not at most {most}"

    def tensors(self, text_width: int) -> dict[str, tuple[int, ...]]:
        """See PictureForm."""
        hidden, inner, merged = self.hidden_size, self.intermediate_size, self.hidden_size * self.merge**2
        needed: dict[str, tuple[int, ...]] = {
            **with_bias(EMBED, (hidden, _CHANNELS, self.patch, self.patch)),
            POSITIONS: (*self.places, hidden),
            **with_bias(LAST_NORM, (hidden,)),
            **with_bias(f"{PROJECTOR}pre_norm", (hidden,)),
            **with_bias(f"{PROJECTOR}proj.0", (merged, merged)),
            **with_bias(f"{PROJECTOR}proj.2", (text_width, merged)),
        }
        for layer in range(self.n_layers):
            prefix = f"{BLOCKS}{layer}."
            needed |= with_bias(f"{prefix}norm0", (hidden,))
            needed |= with_bias(f"{prefix}norm1", (hidden,))
            needed |= with_bias(f"{prefix}wqkv", (3 * hidden, hidden))
            needed |= with_bias(f"{prefix}wo", (hidden, hidden))
            needed |= with_bias(f"{prefix}mlp.fc0", (inner, hidden))
            needed |= with_bias(f"{prefix}mlp.fc1", (hidden, inner))
        return needed


def padded_form(config_file: Path, values: Json) -> PaddedForm | str:
    """A text: why the model is served without pictures. Raises CheckpointError."""
    vision = values.get("vision_config")
    if not isinstance(vision, dict):
        return "config.json has no vision_config"
    read = Reader(config_file, vision)

    def size(name: str, other: str, usual: int) -> int:
        return read.integer(name, read.integer(other, usual))

    for field, kind in _KINDS.items():
        if (found := vision.get(field, kind)) != kind:
            return f"vision_config.{field} {found!r} is not {kind}"
    patch, hidden = read.integer("patch_size", 14), size("vt_hidden_size", "hidden_size", 1152)
    heads = size("vt_num_attention_heads", "num_attention_heads", 16)
    layers = size("vt_num_hidden_layers", "num_hidden_layers", 27)
    places = tuple(size(f"init_pos_emb_{side}", f"pos_emb_{side}", 64) for side in ("height", "width"))
    merge = _merge(vision.get("merge_kernel_size", [2, 2]))
    if not merge or patch * merge > _LARGEST:
        return f"vision_config.merge_kernel_size of patches of {patch} pixels is no square of {_LARGEST} at most"
    if layers > _MOST_LAYERS:
        return f"vision_config: {layers} layers are more than {_MOST_LAYERS}"
    if max(places) > _MOST_PLACES:
        return f"vision_config: {places[0]} x {places[1]} positions are more than {_MOST_PLACES} along a side"
    if hidden % heads or hidden // heads % 4:
        return f"vision_config: {hidden} numbers are not a multiple of 4 for each of {heads} heads"
    if (act := vision.get("hidden_act", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        return f"vision_config.hidden_act {act!r} is not gelu_pytorch_tanh"
    whole = Reader(config_file, values)
    how = _how(config_file.parent / "preprocessor_config.json")
    if (found := how.integer("patch_size", patch)) != patch:
        return f"preprocessor_config.json: patch_size {found} is not that of config.json, {patch}"
    sides = how.values.get("size")
    along = how.inner(sides).integer("max_height", 512) if isinstance(sides, dict) else 512
    return PaddedForm(
        patch=patch,
        merge=merge,
        most_patches=min(how.integer("in_patch_limit", how.integer("max_patches", 16384)), _MOST_PATCHES),
        most_along=min(how.integer("patch_limit_on_one_side", along), _MOST_ALONG),
        places=(places[0], places[1]),
        token=whole.integer("media_placeholder_token_id", whole.integer("image_token_id", _IMAGE_TOKEN)),
        hidden_size=hidden,
        n_layers=layers,
        n_heads=heads,
        intermediate_size=size("vt_intermediate_size", "intermediate_size", 4304),
        rope_theta=rope_theta(read),
        projector_eps=read.number("projector_ln_eps", whole.number("projection_layer_norm_eps", 1e-5)),
        mean=levels(how, "image_mean", _MIDDLE),
        deviation=levels(how, "image_std", _MIDDLE),
    )


def _merge(kernel: object) -> int:
    """Patches along the side of a cell; 0: it is no square."""
    if isinstance(kernel, list) and len(kernel) == 2 and type(kernel[0]) is int and kernel[0] == kernel[1]:
        return max(kernel[0], 0)
    return 0


def _how(file: Path) -> Reader:
    """How pictures are made ready: in published files within `media_proc_cfg`."""
    values = read_object_if_there(file)
    inner = values.get("media_proc_cfg")
    return Reader(file, inner if isinstance(inner, dict) else values)
