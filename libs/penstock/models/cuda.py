"""Kernels of packed rows on a GPU: FlashAttention over all documents at once, everything else as torch has it."""

from __future__ import annotations

import torch
from torch import Tensor

from .data import Spans
from .net import NetShape, rotate
from .packed import TorchKernels


class CudaKernels(TorchKernels):
    """Products and attention in bfloat16. Nothing waits for the device, so that an update can be captured."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)

    def attention(self, qkv: Tensor, spans: Spans, shape: NetShape) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = torch.split(qkv.view(len(qkv), -1, shape.head), [shape.heads, shape.kv_heads, shape.kv_heads], 1)
        steps = torch.arange(shape.head // 2, dtype=torch.float32, device=qkv.device) / (shape.head // 2)
        angles = positions(spans.bounds, len(qkv))[:, None, None] * (1.0 / shape.theta**steps)
        cos, sin = angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (each.repeat_interleave(shape.heads // shape.kv_heads, 1) for each in (k, v))
        bounds, longest = spans.bounds, spans.longest
        out = varlen_attn(q, k, v.contiguous(), bounds, bounds, longest, longest, window_size=(-1, 0))
        assert isinstance(out, Tensor)
        return out.flatten(1)


def positions(bounds: Tensor, rows: int) -> Tensor:
    """The position of each row in its document, float32."""
    row = torch.arange(rows, device=bounds.device, dtype=torch.int32)
    return (row - bounds[torch.searchsorted(bounds, row, right=True) - 1]).float()
