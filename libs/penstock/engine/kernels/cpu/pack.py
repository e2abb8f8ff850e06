"""Matrices in the order in which step.cpp reads them.

A matrix [in, out] is cut into panels of 16 columns, one after the other. Within a panel the inputs follow each other
in pairs, and a pair holds the 16 columns' weights:

- float32: the first input's 16 weights, then the second's;
- bfloat16: of each column the two weights side by side, so that one 32-bit lane holds both;
- int8: like float32, with one float32 scale per column: weight = number * scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LANES = 16


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed matrix. `data` is contiguous [panels, ...]."""

    kind: str
    """float32, bfloat16, int8, or lossless (see lossless.py)."""
    inputs: int
    outputs: int
    """Rounded up to whole panels; the added columns are zero."""
    data: Tensor
    scale: Tensor | None = None
    """float32 [outputs], of int8."""
    start: Tensor | None = None
    """int64 [panels], of lossless: where each panel begins in `data`."""
    parts: Tensor | None = None
    """uint8 [2, 16], of lossless: the palette's upper and lower bits."""


def pack(matrix: Tensor, kind: str) -> Packed:
    """Packs [in, out]; `in` must be even. int8 rounds to 127 steps of the column's largest number."""
    inputs, columns = matrix.shape
    if inputs % 2:
        raise ValueError(f"a matrix of {inputs} inputs can't be packed: the number must be even")
    panels = -(-columns // LANES)
    scale = None
    if kind == "int8":
        matrix, scale = quantised(matrix)
        scale = torch.nn.functional.pad(scale, (0, panels * LANES - columns))
    else:
        matrix = matrix.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    padded = torch.nn.functional.pad(matrix, (0, panels * LANES - columns))
    data = padded.view(inputs // 2, 2, panels, LANES).permute(2, 0, 1, 3)
    if kind == "bfloat16":
        data = data.transpose(2, 3)
    return Packed(kind, inputs, panels * LANES, data.contiguous(), scale)


def unpack(packed: Packed, columns: int) -> Tensor:
    """The matrix again, [in, columns] in float32 (int8) or in its own type."""
    data = packed.data.transpose(2, 3) if packed.kind == "bfloat16" else packed.data
    matrix = data.permute(1, 2, 0, 3).reshape(packed.inputs, packed.outputs)
    if packed.scale is not None:
        return (matrix.float() * packed.scale)[:, :columns]
    return matrix[:, :columns]


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
