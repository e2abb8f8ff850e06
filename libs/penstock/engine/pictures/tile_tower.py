"""The vision transformer of Llama 4: tiles to embeddings of the text model. Computed by torch.

Source: the config fields and tensor names of published checkpoints; `transformers`' Llama4VisionModel is the oracle of
the tests. Tiles do not look at each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from penstock.checkpoint import PicturePart, TileForm
from penstock.checkpoint.pictures.tiles import CLASS, PATCHES, POSITIONS, PROJECTION
from penstock.engine.pictures.weights import EncoderWeights, Parts, turned_pairs

if TYPE_CHECKING:
    from penstock.pictures.picture import Pixels

_MEAN = _DEVIATION = 0.5
_ADAPTER = "vision_model.vision_adapter.mlp."


class TileTower:
    """PictureTower. Stateless between calls; one thread at a time."""

    def __init__(self, part: PicturePart, dtype: torch.dtype, device: torch.device) -> None:
        """Loads the weights, as `dtype`. Raises CheckpointError."""
        assert isinstance(part.form, TileForm)
        self.form = part.form
        self._weights = EncoderWeights(part, dtype, device)
        self._turns = turns(self.form).to(device).unsqueeze(1)

    @torch.inference_mode()
    def parts(self, pixels: Pixels) -> Parts:
        """[T, side, side, 3] -> [T, embeddings of a tile, hidden of the text model]."""
        weights, form = self._weights, self.form
        x = functional.linear(self._patches(pixels), weights[PATCHES])
        x = torch.cat([x, weights[CLASS].expand(len(x), 1, -1)], 1) + weights[POSITIONS]
        x = weights.norm(x, "vision_model.layernorm_pre")
        for layer in range(form.n_layers):
            prefix = f"vision_model.model.layers.{layer}."
            x = x + self._attention(weights.norm(x, f"{prefix}input_layernorm"), f"{prefix}self_attn.")
            inner = weights.linear(weights.norm(x, f"{prefix}post_attention_layernorm"), f"{prefix}mlp.fc1")
            x = x + weights.linear(functional.gelu(inner), f"{prefix}mlp.fc2")
            yield
        x = shuffled(weights.norm(x, "vision_model.layernorm_post")[:, :-1], form.shuffle)
        x = functional.gelu(functional.linear(x, weights[f"{_ADAPTER}fc1.weight"]))
        x = functional.gelu(functional.linear(x, weights[f"{_ADAPTER}fc2.weight"]))
        return functional.linear(x, weights[PROJECTION])

    def _patches(self, pixels: Pixels) -> Tensor:
        """[T, patches, 3 * patch * patch], from -1 to 1; rounded to bfloat16 on the way, as the model was trained,
        whatever computes the rest."""
        size, count = self.form.patch, self.form.patches
        levels = torch.from_numpy(pixels).to(self._weights.device).to(torch.bfloat16)
        levels = levels.mul_(1 / 255).sub_(_MEAN).div_(_DEVIATION).to(self._weights.dtype)
        parts = levels.view(len(pixels), count, size, count, size, 3).permute(0, 1, 3, 5, 2, 4)
        return parts.reshape(len(pixels), count * count, -1)

    def _attention(self, x: Tensor, prefix: str) -> Tensor:
        heads, linear = (*x.shape[:2], self.form.n_heads, -1), self._weights.linear
        query, key = (
            turned_pairs(linear(x, f"{prefix}{name}").view(heads), self._turns) for name in ("q_proj", "k_proj")
        )
        value = linear(x, f"{prefix}v_proj").view(heads)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return linear(mixed.transpose(1, 2).flatten(2), f"{prefix}o_proj")


def turns(form: TileForm) -> Tensor:
    """complex64 [patches + 1, head_dim / 2]: how far each pair is turned; half of them by column and half by row, from
    1 on, and nothing of the last row, the class's."""
    half = form.hidden_size // form.n_heads // 2
    rates = 1.0 / form.rope_theta ** (torch.arange(0, half, 2).float() / half)
    places = torch.arange(form.patches**2)
    angles = [((axis + 1).unsqueeze(1) * rates) for axis in (places % form.patches, places // form.patches)]
    found = torch.cat([torch.cat(angles, 1), torch.zeros(1, half)])
    return torch.polar(torch.ones_like(found), found)


def shuffled(x: Tensor, by: int) -> Tensor:
    """[T, side * side, width] -> [T, (side / by) ** 2, width * by * by]: neighbours become one. Among the numbers of
    one, rows of patches come before columns."""
    count, patches, width = x.shape
    side = round(patches**0.5)
    x = x.view(count, side // by, by, side // by, by, width)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(count, -1, width * by * by)
