"""Qwen2.5-VL's way to see pictures, from config.json.

A picture keeps its proportions and is scaled to whole cells, each of them a few patches in each direction. A vision
transformer computes the patches of the whole picture, in most layers within windows, and the patches of a cell become
one embedding of the text model. Source: the config fields and tensors of published Qwen2.5-VL checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.errors import CheckpointError
from penstock.checkpoint.files import Json, read_object_if_there
from penstock.checkpoint.pictures.cells import CellForm, levels, rope_theta, with_bias
from penstock.checkpoint.reading import Reader

PATCHES = "visual.patch_embed.proj.weight"
MERGER = "visual.merger."
_CHANNELS = 3
_MOST_LAYERS = 1000
_LARGEST = 128
"""Pixels of a cell's side."""
_MOST_FRAMES = 16
_MOST_PIXELS = 1 << 24
_LEAST, _MOST = 56 * 56, 28 * 28 * 1280
"""Pixels, where the checkpoint does not say."""
_IMAGE_TOKEN = 151655
_FULL = (7, 15, 23, 31)
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
"""CLIP's (Radford et al., 2021)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchForm(CellForm):
    """PictureForm: pictures are scaled to whole cells."""

    frames: int
    """Times that a picture counts, where a film has as many frames."""
    least_pixels: int
    """Smaller pictures are made larger."""
    most_pixels: int
    """Larger ones are made smaller."""
    window: int
    """Cells along the side of a window."""
    full_layers: tuple[int, ...]
    """Layers in which all patches of a picture look at each other."""

    @property
    def spatial(self) -> bool:
        """See PictureForm."""
        return True

    def complaint(self, rows: int, columns: int) -> str:
        """See PictureForm. A picture that is one cell high or wide may have more than the most pixels."""
        pixels = rows * columns * self.side**2
        if 0 < pixels <= max(self.most_pixels, self.side**2 * max(rows, columns)) and pixels <= _MOST_PIXELS:
            return ""
        return f"{rows} x {columns} cells of {self.side} pixels are not at most {self.most_pixels} pixels"

    def tensors(self, text_width: int) -> dict[str, tuple[int, ...]]:
        """See PictureForm."""
        hidden, inner, merged = self.hidden_size, self.intermediate_size, self.hidden_size * self.merge**2
        needed: dict[str, tuple[int, ...]] = {
            PATCHES: (hidden, _CHANNELS, self.frames, self.patch, self.patch),
            f"{MERGER}ln_q.weight": (hidden,),
            **with_bias(f"{MERGER}mlp.0", (merged, merged)),
            **with_bias(f"{MERGER}mlp.2", (text_width, merged)),
        }
        for layer in range(self.n_layers):
            prefix = f"visual.blocks.{layer}."
            needed |= {f"{prefix}norm1.weight": (hidden,), f"{prefix}norm2.weight": (hidden,)}
            needed |= with_bias(f"{prefix}attn.qkv", (3 * hidden, hidden))
            needed |= with_bias(f"{prefix}attn.proj", (hidden, hidden))
            needed |= with_bias(f"{prefix}mlp.gate_proj", (inner, hidden))
            needed |= with_bias(f"{prefix}mlp.up_proj", (inner, hidden))
            needed |= with_bias(f"{prefix}mlp.down_proj", (hidden, inner))
        return needed


def patch_form(config_file: Path, values: Json) -> PatchForm | str:
    """A text: why the model is served without pictures. Raises CheckpointError."""
    vision = values.get("vision_config")
    if not isinstance(vision, dict):
        return "config.json has no vision_config"
    read = Reader(config_file, vision)
    patch, merge = read.integer("patch_size", 14), read.integer("spatial_merge_size", 2)
    hidden, heads = read.integer("hidden_size", 3584), read.integer("num_heads", 16)
    layers, frames = read.integer("depth", 32), read.integer("temporal_patch_size", 2)
    window = read.integer("window_size", 112) // (patch * merge)
    if patch * merge > _LARGEST:
        return f"vision_config.patch_size {patch}, {merge} of which are a cell, is more than {_LARGEST} pixels for one"
    if layers > _MOST_LAYERS:
        return f"vision_config.depth {layers} is more than {_MOST_LAYERS}"
    if frames > _MOST_FRAMES:
        return f"vision_config.temporal_patch_size {frames} is more than {_MOST_FRAMES}"
    if hidden % heads or hidden // heads % 4:
        return f"vision_config.hidden_size {hidden} is not a multiple of 4 for each of {heads} heads"
    if not window:
        return f"vision_config.window_size is less than {patch * merge}, the side of a cell"
    if (act := vision.get("hidden_act", "silu")) != "silu":
        return f"vision_config.hidden_act {act!r} is not silu"
    if read.integer("in_channels", _CHANNELS) != _CHANNELS or read.integer("in_chans", _CHANNELS) != _CHANNELS:
        return f"vision_config.in_channels is not {_CHANNELS}"
    full = read.layer_numbers("fullatt_block_indexes", _MOST_LAYERS) if "fullatt_block_indexes" in vision else _FULL
    how_file = config_file.parent / "preprocessor_config.json"
    how = Reader(how_file, read_object_if_there(how_file))
    for name, own in (("patch_size", patch), ("merge_size", merge), ("temporal_patch_size", frames)):
        if (found := how.integer(name, own)) != own:
            return f"preprocessor_config.json: {name} {found} is not that of config.json, {own}"
    least, most = _pixels(how)
    return PatchForm(
        patch=patch,
        merge=merge,
        frames=frames,
        least_pixels=least,
        most_pixels=most,
        window=window,
        full_layers=tuple(full),
        token=Reader(config_file, values).integer("image_token_id", _IMAGE_TOKEN),
        hidden_size=hidden,
        n_layers=layers,
        n_heads=heads,
        intermediate_size=read.integer("intermediate_size", 3420),
        rope_theta=rope_theta(read),
        mean=levels(how, "image_mean", _MEAN),
        deviation=levels(how, "image_std", _DEVIATION),
    )


def _pixels(how: Reader) -> tuple[int, int]:
    """(Least, most) pixels of a picture. The most are bounded whatever the checkpoint says: larger pictures are scaled
    a little more."""
    size = how.values.get("size")
    sizes = how.inner(size) if isinstance(size, dict) else how.inner({})
    least = how.integer("min_pixels", sizes.integer("shortest_edge", _LEAST))
    most = how.integer("max_pixels", sizes.integer("longest_edge", _MOST))
    if least > most:
        raise CheckpointError(how.file, f"min_pixels {least} is more than max_pixels {most}")
    return min(least, _MOST_PIXELS // 4), min(most, _MOST_PIXELS)
