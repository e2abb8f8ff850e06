"""The sizes of the parts that turn pictures into rows of the decoder, from config.json alone."""

from __future__ import annotations

from penstock.checkpoint.files import Json
from penstock.checkpoint.reading import Reader

_BIASED_NORM = 2
"""Vectors of a norm with a bias."""


def picture_numbers(read: Reader, architecture: str, hidden: int) -> int:
    """Parameters of the part for pictures of a model whose decoder is `hidden` wide; 0: it has none. Raises
    CheckpointError."""
    values = read.values.get("vision_config")
    count = _KINDS.get(architecture.removesuffix("ForConditionalGeneration"))
    if count is None or values is None:
        return 0
    if not isinstance(values, dict):
        raise read.fail(f"vision_config must be an object, not {values!r}")
    return count(read.inner(values), hidden)


def _gemma_3(read: Reader, hidden: int) -> int:
    """SigLIP without its last block (Zhai et al., 2023), and one matrix."""
    width, patch = read.integer("hidden_size", 768), read.integer("patch_size", 16)
    patches = (read.integer("image_size", 224) // patch) ** 2
    blocks = read.integer("num_hidden_layers", 12) * _block(width, read.integer("intermediate_size", 3072))
    begin = _linear(read.integer("num_channels", 3) * patch**2, width) + patches * width
    return begin + blocks + _BIASED_NORM * width + width * hidden + width


def _llama_4(read: Reader, hidden: int) -> int:
    width, inner = read.integer("hidden_size", 768), read.integer("intermediate_size", 5632)
    patch = read.integer("patch_size", 14)
    places = (read.integer("image_size", 448) // patch) ** 2 + 1
    begin = read.integer("num_channels", 3) * patch**2 * width + width + places * width + 2 * _BIASED_NORM * width
    blocks = read.integer("num_hidden_layers", 34) * _block(width, inner)
    out = read.integer("projector_output_dim", 4096)
    adapter = inner * read.integer("projector_input_dim", 4096) + out * out
    return begin + blocks + adapter + read.integer("vision_output_dim", 7680) * hidden


def _kimi(read: Reader, hidden: int) -> int:
    """MoonViT; its fields have other names in published files than in those of transformers."""
    values = {_KIMI_NAMES.get(name, name): value for name, value in read.values.items()}
    read = read.inner(values)
    width, patch = read.integer("hidden_size", 1152), read.integer("patch_size", 14)
    places = read.integer("pos_emb_height", 64) * read.integer("pos_emb_width", 64)
    begin = _linear(3 * patch**2, width) + places * width
    blocks = read.integer("num_hidden_layers", 27) * _block(width, read.integer("intermediate_size", 4304))
    merged = width * _merged(read, values)
    projector = _BIASED_NORM * width + _linear(merged, merged) + _linear(merged, hidden)
    return begin + blocks + _BIASED_NORM * width + projector


_KIMI_NAMES = {
    "vt_hidden_size": "hidden_size",
    "vt_num_hidden_layers": "num_hidden_layers",
    "vt_intermediate_size": "intermediate_size",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
}


def _merged(read: Reader, values: Json) -> int:
    """Patches that become one row."""
    kernel = values.get("merge_kernel_size", [2, 2])
    if not isinstance(kernel, list) or len(kernel) != 2 or not all(type(side) is int and side > 0 for side in kernel):
        raise read.fail(f"vision_config: merge_kernel_size must be two positive integers, not {kernel!r}")
    return int(kernel[0] * kernel[1])


def _block(width: int, inner: int) -> int:
    """A block of a vision transformer, all of whose parts have biases."""
    return 4 * _linear(width, width) + _linear(width, inner) + _linear(inner, width) + 2 * _BIASED_NORM * width


def _linear(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


_KINDS = {"Gemma3": _gemma_3, "Llama4": _llama_4, "Kimi_K25": _kimi, "KimiK25": _kimi}
