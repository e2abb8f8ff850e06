"""The weights of a vision encoder, and what all encoders do with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from penstock.checkpoint import PicturePart
from penstock.checkpoint.pictures.cells import CellForm
from penstock.engine.layers.stored import read_tensor

if TYPE_CHECKING:
    from penstock.pictures.picture import Pixels


class EncoderWeights:
    """By the names of the checkpoint."""

    def __init__(self, part: PicturePart, dtype: torch.dtype, device: torch.device) -> None:
        """Loads them, as `dtype`. Raises CheckpointError."""
        self.dtype, self.device = dtype, device
        self._found = {name: read_tensor(info).to(device, dtype) for name, info in part.tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._found[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """With its bias."""
        return functional.linear(x, self[f"{name}.weight"].flatten(1), self[f"{name}.bias"])

    def norm(self, x: Tensor, name: str, eps: float = 1e-5) -> Tensor:
        """LayerNorm with its bias."""
        return functional.layer_norm(x, x.shape[-1:], self[f"{name}.weight"], self[f"{name}.bias"], eps)

    def normalised(self, pixels: Pixels, form: CellForm) -> Tensor:
        """[1, height, width, 3] -> float32 [height, width, 3], as the checkpoint says."""
        levels = torch.from_numpy(pixels[0]).to(self.device).float() / 255
        return (levels - levels.new_tensor(form.mean)) / levels.new_tensor(form.deviation)


def turned_pairs(x: Tensor, turn: Tensor) -> Tensor:
    """Turns neighbouring dimensions of [..., heads, head_dim] together; `turn` is complex, [..., 1, head_dim / 2]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
