"""The vision transformer of Kimi K2.5 (MoonViT): pictures to embeddings of the text model. Computed by torch.

Source: the config fields and tensor names of published checkpoints; `transformers`' Kimi_K25 model is the oracle of the
tests. Patches are in the order of rows, and all of a picture look at each other.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from penstock.checkpoint import PaddedForm, PicturePart
from penstock.checkpoint.pictures.padded import BLOCKS, EMBED, LAST_NORM, POSITIONS, PROJECTOR
from penstock.engine.pictures.weights import EncoderWeights, Parts, attention, in_heads, in_rows, turned_pairs

if TYPE_CHECKING:
    from penstock.pictures.picture import Pixels


class PaddedTower:
    """PictureTower. Stateless between calls; one thread at a time."""

    def __init__(self, part: PicturePart, dtype: torch.dtype, device: torch.device) -> None:
        """Loads the weights, as `dtype`. Raises CheckpointError."""
        assert isinstance(part.form, PaddedForm)
        self.form = part.form
        self._weights = EncoderWeights(part, dtype, device)

    @torch.inference_mode()
    def parts(self, pixels: Pixels) -> Parts:
        """[1, height, width, 3] -> [1, cells, hidden of the text model]."""
        form, weights = self.form, self._weights
        rows, columns = pixels.shape[1] // form.patch, pixels.shape[2] // form.patch
        x = yield from in_rows(self._patches(pixels), lambda own: weights.linear(own, EMBED))
        x = x + self._positions(rows, columns)
        turn = turns(form, rows, columns).to(weights.device).unsqueeze(1)
        for layer in range(form.n_layers):
            prefix = f"{BLOCKS}{layer}."
            x = x + (yield from self._attention(x, prefix, turn))
            x = x + (yield from in_rows(x, partial(self._feed_forward, prefix=prefix)))
        x = weights.norm(x, LAST_NORM)
        cells = x.view(rows // form.merge, form.merge, columns // form.merge, form.merge, -1).transpose(1, 2)
        x = weights.norm(cells.reshape(len(x), -1), f"{PROJECTOR}pre_norm", form.projector_eps)
        return (yield from in_rows(x.view(len(x) // form.merge**2, -1), self._projected)).unsqueeze(0)

    def _patches(self, pixels: Pixels) -> Tensor:
        """[patches, 3 * patch * patch], normalised as the checkpoint says."""
        form = self.form
        levels = self._weights.normalised(pixels, form)
        parts = levels.view(-1, form.patch, levels.shape[1] // form.patch, form.patch, 3).permute(0, 2, 4, 1, 3)
        return parts.reshape(-1, 3 * form.patch**2).to(self._weights.dtype)

    def _positions(self, rows: int, columns: int) -> Tensor:
        """[patches, hidden]: those that were learned, stretched to the picture's grid."""
        grid = self._weights[POSITIONS].float().permute(2, 0, 1).unsqueeze(0)
        found = functional.interpolate(grid, (rows, columns), mode="bicubic", align_corners=False)
        return found[0].flatten(1).t().to(self._weights.dtype)

    def _feed_forward(self, x: Tensor, prefix: str) -> Tensor:
        weights = self._weights
        inner = weights.linear(weights.norm(x, f"{prefix}norm1"), f"{prefix}mlp.fc0")
        return weights.linear(functional.gelu(inner, approximate="tanh"), f"{prefix}mlp.fc1")

    def _projected(self, cells: Tensor) -> Tensor:
        inner = functional.gelu(self._weights.linear(cells, f"{PROJECTOR}proj.0"))
        return self._weights.linear(inner, f"{PROJECTOR}proj.2")

    def _attention(self, x: Tensor, prefix: str, turn: Tensor) -> Parts:
        """[patches, hidden] -> the same."""
        weights = self._weights

        def heads(own: slice) -> tuple[Tensor, Tensor, Tensor]:
            normed = weights.norm(x[own], f"{prefix}norm0")
            made = weights.linear(normed, f"{prefix}wqkv").view(len(normed), 3, self.form.n_heads, -1)
            return turned_pairs(made[:, 0], turn[own]), turned_pairs(made[:, 1], turn[own]), made[:, 2]

        found = yield from in_heads(x, heads)
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in found)
        mixed = yield from attention(query, key, value)
        rows = mixed[0].transpose(0, 1).flatten(1)
        return (yield from in_rows(rows, lambda own: weights.linear(own, f"{prefix}wo")))


def turns(form: PaddedForm, rows: int, columns: int) -> Tensor:
    """complex64 [patches, head_dim / 2]: how far each pair is turned, by column and by row in turns."""
    half = form.hidden_size // form.n_heads // 2
    rates = 1.0 / form.rope_theta ** (torch.arange(0, half, 2).float() / half)
    place = torch.arange(rows * columns)
    angles = torch.stack([axis.unsqueeze(1) * rates for axis in (place % columns, place // columns)], -1).flatten(1)
    return torch.polar(torch.ones_like(angles), angles)
