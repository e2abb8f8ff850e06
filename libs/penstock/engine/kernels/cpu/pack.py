"""Matrices in the order in which step.cpp reads them.

A matrix [in, out] is cut into panels of 16 columns, one after the other. Within a panel the inputs follow each other
in pairs, and a pair holds the 16 columns' weights:

- float32: the first input's 16 weights, then the second's;
- bfloat16: the two weights of each column side by side, so that one 32-bit lane holds both;
- int8: like float32, with one float32 scale per column: weight = number * scale;
- lossless: like bfloat16, in 12 bits for each weight, see lossless.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.build import library
from penstock.engine.kernels.cpu.lossless import compressed
from penstock.engine.kernels.cpu.packed import LANES, Packed
from penstock.engine.kernels.rounding import quantised


def pack(matrix: Tensor, kind: str) -> Packed:
    """Packs a matrix [in, out]; `in` must be even. int8 rounds to 127 steps of the column's largest number; lossless
    needs the compiled library and raises NotBuilt without it."""
    inputs, columns = matrix.shape
    if inputs % 2:
        raise ValueError(f"a matrix of {inputs} inputs can't be packed: the number must be even")
    if kind == "lossless":
        return compressed(library(), pack(matrix, "bfloat16"))
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
    """Restores the matrix [in, columns], in float32 for int8, else in its own type. For lossless see naive_restore."""
    data = packed.data.transpose(2, 3) if packed.kind == "bfloat16" else packed.data
    matrix = data.permute(1, 2, 0, 3).reshape(packed.inputs, packed.outputs)
    if packed.scale is not None:
        return (matrix.float() * packed.scale)[:, :columns]
    return matrix[:, :columns]
