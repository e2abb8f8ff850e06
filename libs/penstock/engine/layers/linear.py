"""Products with matrices, however these are kept."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class HeldMatrix(Protocol):
    """A matrix that is kept in a form of its own, with its bias."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def product(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        ...

    def columns(self, first: int, last: int) -> HeldMatrix:
        """A view of some columns."""
        ...


Matrix = Tensor | HeldMatrix
"""[in, out]. A HeldMatrix contains its bias and expects inputs of the type that its kind computes with."""


def linear(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """[N, in] -> [N, out]."""
    if isinstance(matrix, Tensor):
        return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)
    return matrix.product(x)


def columns(matrix: Matrix, first: int, last: int) -> Matrix:
    """The columns [first, last) of a matrix: a view."""
    return matrix[:, first:last] if isinstance(matrix, Tensor) else matrix.columns(first, last)
