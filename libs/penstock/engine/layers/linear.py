"""Products with matrices, however these are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.matrix import PackedMatrix

Matrix = Tensor | PackedMatrix
"""[in, out]. A packed one holds its bias and takes float32."""


def linear(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """[N, in] -> [N, out]."""
    if isinstance(matrix, PackedMatrix):
        return matrix.product(x)
    return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)


def columns(matrix: Matrix, first: int, last: int) -> Matrix:
    """The columns [first, last) of a matrix: a view."""
    return matrix.columns(first, last) if isinstance(matrix, PackedMatrix) else matrix[:, first:last]
