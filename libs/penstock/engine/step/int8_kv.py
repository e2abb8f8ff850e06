"""Keys and values in 8 bits: each head's vector has a scale of its own, kept in the same block.

A token's row is the numbers of all its heads, then the heads' scales: int8 [kv_heads, head_dim] and float32 [kv_heads],
so kv_heads * (head_dim + 4) bytes. A number stands for number * scale, with 127 steps to the vector's largest: off by
half a step at most, which is 0.4 % of it. kernels/cpu/tiles.h reads and writes the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4


def to_rows(vectors: Tensor) -> Tensor:
    """[N, kv_heads, head_dim] -> int8 [N, kv_heads * (head_dim + 4)]."""
    wide = vectors.float()
    scale = wide.abs().amax(-1, keepdim=True) / 127
    numbers = (wide / torch.where(scale == 0, 1.0, scale)).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((numbers.flatten(1), scale.flatten(1).view(torch.int8)), 1)


def from_rows(rows: Tensor, kv_heads: int) -> Tensor:
    """int8 [N, kv_heads * (head_dim + 4)], contiguous -> float32 [N, kv_heads, head_dim]."""
    cut = rows.shape[1] - kv_heads * SCALE_BYTES
    scale = rows[:, cut:].contiguous().view(torch.float32)
    return rows[:, :cut].float().view(len(rows), kv_heads, -1).mul_(scale.unsqueeze(-1))
