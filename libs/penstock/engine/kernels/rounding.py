"""Weights in 8 and in 4 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.kernels.groups import GROUP, keeps_numbers
from penstock.engine.layers.stacks import Stack


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


def grouped(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a matrix to 4 bits: (numbers from -8 to 7, int8 [in, out]; bfloat16 [groups, out]).

    Each group of a column has a scale, 2/15 of its largest number. That number is then half a step from 7 or -8, and no
    other is off by more.
    """
    inputs, columns = matrix.shape
    wide = torch.nn.functional.pad(matrix.float(), (0, 0, 0, -inputs % GROUP)).view(-1, GROUP, columns)
    scale = (wide.abs().amax(1) / 7.5).bfloat16()
    safe = torch.where(scale == 0, 1.0, scale.float()).unsqueeze(1)
    numbers = (wide / safe).round_().clamp_(-8, 7).to(torch.int8)
    return numbers.view(-1, columns)[:inputs], scale


def degrouped(numbers: Tensor, scale: Tensor) -> Tensor:
    """What the results of `grouped` stand for, in float32: the product of number and scale is exact."""
    return numbers.float() * scale.float().repeat_interleave(GROUP, 0)[: len(numbers)]


def keeps_groups(stack: Stack) -> bool:
    """Whether int4 keeps a matrix as it is stored, see `keeps_numbers`."""
    return not stack.turned and all(map(keeps_numbers, stack.parts))


def kind_of(stack: Stack, kind: str, stored: bool) -> str:
    """How a matrix is kept where weights are kept as `kind`. `stored`: the checkpoint has matrices in 4 bits; then
    int4 keeps these as they are, and rounds no other. Else it rounds all but the last, which no later one evens out."""
    if stack.exact and kind not in ("float32", "bfloat16"):
        return "bfloat16"
    if kind != "int4":
        return kind
    if stored:
        return "int4" if keeps_groups(stack) else "bfloat16"
    return "int8" if stack.name == "head" else "int4"
