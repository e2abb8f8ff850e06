"""Matrices in the order in which step.cpp reads them.

A matrix [in, out] is cut into panels of 16 columns, one after the other. Within a panel the inputs follow each other
in pairs, and a pair holds the 16 columns' weights:

- float32: the first input's 16 weights, then the second's;
- bfloat16: the two weights of each column side by side, so that one 32-bit lane holds both;
- int8: like float32, with one float32 scale per column: weight = number * scale;
- int4: groups of 32 inputs, the last one filled up with zeros: 16 bfloat16 scales, then, for every 8 inputs, a 32-bit
  word for each column. Weight = number * scale, and the number of 4 bits lies in the bits from 4 i on of a word for the
  first input of its pair i, and from 16 + 4 i on for the second;
- lossless: like bfloat16, in 12 bits for each weight, see lossless.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.build import library
from penstock.engine.kernels.cpu.lossless import compressed
from penstock.engine.kernels.cpu.packed import LANES, Packed
from penstock.engine.kernels.groups import GROUP
from penstock.engine.kernels.rounding import grouped, quantised

_LINES = GROUP // 8


def pack(matrix: Tensor, kind: str) -> Packed:
    """Packs a matrix [in, out]; `in` must be even. int8 rounds to 127 steps of the column's largest number, int4 as
    `grouped` says; lossless needs the compiled library and raises NotBuilt without it."""
    inputs, columns = matrix.shape
    if inputs % 2:
        raise ValueError(f"a matrix of {inputs} inputs can't be packed: the number must be even")
    if kind == "lossless":
        return compressed(library(), pack(matrix, "bfloat16"))
    if kind == "int4":
        return pack_groups(*grouped(matrix))
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


def pack_groups(numbers: Tensor, scale: Tensor) -> Packed:
    """Packs numbers from -8 to 7 of an int4 matrix, int8 [in, out]; `scale` is bfloat16 [groups of 32, out]."""
    inputs, columns = numbers.shape
    groups, panels = len(scale), -(-columns // LANES)
    beyond = panels * LANES - columns
    padded = torch.nn.functional.pad(numbers, (0, beyond, 0, groups * GROUP - inputs)).long() & 15
    nibbles = padded.view(groups, _LINES, 4, 2, panels, LANES)
    places = torch.tensor([[4 * pair, 4 * pair + 16] for pair in range(4)]).view(4, 2, 1, 1)
    words = (nibbles << places).sum((2, 3)).to(torch.int32).permute(2, 0, 1, 3)
    scales = torch.nn.functional.pad(scale, (0, beyond)).view(groups, panels, LANES).transpose(0, 1)
    data = torch.cat([part.contiguous().view(torch.uint8).view(panels, groups, -1) for part in (scales, words)], -1)
    return Packed("int4", inputs, panels * LANES, data)


def unpack(packed: Packed, columns: int) -> Tensor:
    """Restores the matrix [in, columns], in float32 for int8 and int4, else in its own type. For lossless see
    naive_restore."""
    if packed.kind == "int4":
        return _unpack_groups(packed)[:, :columns]
    data = packed.data.transpose(2, 3) if packed.kind == "bfloat16" else packed.data
    matrix = data.permute(1, 2, 0, 3).reshape(packed.inputs, packed.outputs)
    if packed.scale is not None:
        return (matrix.float() * packed.scale)[:, :columns]
    return matrix[:, :columns]


def _unpack_groups(packed: Packed) -> Tensor:
    """float32 [in, outputs]."""
    panels, groups, _ = packed.data.shape
    scale = packed.data[..., : 2 * LANES].contiguous().view(torch.bfloat16).float()
    words = packed.data[..., 2 * LANES :].contiguous().view(torch.int32).view(panels, groups, _LINES, LANES)
    numbers = torch.stack([words << 28 - place for pair in range(4) for place in (4 * pair, 4 * pair + 16)], 3) >> 28
    matrix = numbers.flatten(2, 3) * scale.unsqueeze(2)
    return matrix.permute(1, 2, 0, 3).reshape(groups * GROUP, packed.outputs)[: packed.inputs]
