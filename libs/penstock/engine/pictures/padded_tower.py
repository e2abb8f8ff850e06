"""The vision transformer of Kimi K2.5 (MoonViT): pictures to embeddings of the text model. Computed by torch.

Source: the config fields and tensor names of published checkpoints; `transformers`' Kimi_K25 model is the oracle of the
tests. Patches are in the order of rows, and all of a picture look at each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from penstock.checkpoint import PaddedForm, PicturePart
from penstock.checkpoint.pictures.padded import BLOCKS, EMBED, LAST_NORM, POSITIONS, PROJECTOR
from penstock.engine.layers.stored import read_tensor

if TYPE_CHECKING:
    from penstock.pictures.picture import Pixels

_EPS = 1e-5


class PaddedTower:
    """PictureTower. Stateless between calls; one thread at a time."""

    def __init__(self, part: PicturePart, dtype: torch.dtype, device: torch.device) -> None:
        """Loads the weights, as `dtype`. Raises CheckpointError."""
        assert isinstance(part.form, PaddedForm)
        self.form = part.form
        self._dtype, self._device = dtype, device
        self._weights: Mapping[str, Tensor] = {
            name: read_tensor(info).to(device, dtype) for name, info in part.tensors.items()
        }

    @torch.inference_mode()
    def embeddings(self, pixels: Pixels) -> Tensor:
        """[1, height, width, 3] -> [1, cells, hidden of the text model]."""
        form, weights = self.form, self._weights
        rows, columns = pixels.shape[1] // form.patch, pixels.shape[2] // form.patch
        x = functional.linear(self._patches(pixels), weights[f"{EMBED}.weight"].flatten(1), weights[f"{EMBED}.bias"])
        x = x + self._positions(rows, columns)
        turn = turns(form, rows, columns).to(self._device).unsqueeze(1)
        for layer in range(form.n_layers):
            prefix = f"{BLOCKS}{layer}."
            x = x + self._attention(self._norm(x, f"{prefix}norm0"), prefix, turn)
            inner = self._linear(self._norm(x, f"{prefix}norm1"), f"{prefix}mlp.fc0")
            x = x + self._linear(functional.gelu(inner, approximate="tanh"), f"{prefix}mlp.fc1")
        x = self._norm(x, LAST_NORM)
        cells = x.view(rows // form.merge, form.merge, columns // form.merge, form.merge, -1).transpose(1, 2)
        x = self._norm(cells.reshape(len(x), -1), f"{PROJECTOR}pre_norm", form.projector_eps)
        x = functional.gelu(self._linear(x.view(len(x) // form.merge**2, -1), f"{PROJECTOR}proj.0"))
        return self._linear(x, f"{PROJECTOR}proj.2").unsqueeze(0)

    def _patches(self, pixels: Pixels) -> Tensor:
        """[patches, 3 * patch * patch], normalised as the checkpoint says."""
        form = self.form
        levels = torch.from_numpy(pixels[0]).to(self._device).float() / 255
        levels = (levels - levels.new_tensor(form.mean)) / levels.new_tensor(form.deviation)
        parts = levels.view(-1, form.patch, levels.shape[1] // form.patch, form.patch, 3).permute(0, 2, 4, 1, 3)
        return parts.reshape(-1, 3 * form.patch**2).to(self._dtype)

    def _positions(self, rows: int, columns: int) -> Tensor:
        """[patches, hidden]: those that were learned, stretched to the picture's grid."""
        grid = self._weights[POSITIONS].float().permute(2, 0, 1).unsqueeze(0)
        found = functional.interpolate(grid, (rows, columns), mode="bicubic", align_corners=False)
        return found[0].flatten(1).t().to(self._dtype)

    def _norm(self, x: Tensor, name: str, eps: float = _EPS) -> Tensor:
        return functional.layer_norm(
            x, x.shape[-1:], self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], eps
        )

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _attention(self, x: Tensor, prefix: str, turn: Tensor) -> Tensor:
        """[patches, hidden] -> the same."""
        made = self._linear(x, f"{prefix}wqkv").view(len(x), 3, self.form.n_heads, -1)
        query, key = (_turned(made[:, part], turn).transpose(0, 1).unsqueeze(0) for part in (0, 1))
        value = made[:, 2].transpose(0, 1).unsqueeze(0)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self._linear(mixed[0].transpose(0, 1).flatten(1), f"{prefix}wo")


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """Turns neighbouring dimensions of [patches, heads, head_dim] together."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def turns(form: PaddedForm, rows: int, columns: int) -> Tensor:
    """complex64 [patches, head_dim / 2]: how far each pair is turned, by column and by row in turns."""
    half = form.hidden_size // form.n_heads // 2
    rates = 1.0 / form.rope_theta ** (torch.arange(0, half, 2).float() / half)
    place = torch.arange(rows * columns)
    angles = torch.stack([axis.unsqueeze(1) * rates for axis in (place % columns, place // columns)], -1).flatten(1)
    return torch.polar(torch.ones_like(angles), angles)
