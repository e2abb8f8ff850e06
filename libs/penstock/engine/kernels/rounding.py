"""Weights in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor


def quantised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a matrix to 8 bits: (int8 [in, out], float32 [out]), symmetric, with one scale per column."""
    wide = matrix.float()
    scale = wide.abs().amax(0) / 127
    safe = torch.where(scale == 0, 1.0, scale)
    return (wide / safe).round_().clamp_(-127, 127).to(torch.int8), scale


def dequantised(matrix: Tensor) -> Tensor:
    """The matrix after rounding to int8, in float32: the numbers for which the packed matrix stands."""
    numbers, scale = quantised(matrix)
    return numbers.float() * scale
