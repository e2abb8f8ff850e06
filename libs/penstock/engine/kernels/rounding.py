"""Weights in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor


def quantised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [in, out], float32 [out]): symmetric, one scale per column."""
    wide = matrix.float()
    scale = wide.abs().amax(0) / 127
    safe = torch.where(scale == 0, 1.0, scale)
    return (wide / safe).round_().clamp_(-127, 127).to(torch.int8), scale


def dequantised(matrix: Tensor) -> Tensor:
    """What int8 makes of a matrix, as float32: the same numbers as the packed one stands for."""
    numbers, scale = quantised(matrix)
    return numbers.float() * scale
