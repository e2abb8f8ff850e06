"""The decoder's matrices as a checkpoint stores them, and the form in which each is kept when it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.checkpoint import TensorInfo
from penstock.engine.layers.linear import Matrix


@dataclass(frozen=True, slots=True)
class Stack:
    """A matrix of the decoder: stored ones [out, in], put one above the other and then turned."""

    name: str
    """Of the decoder's matrix, such as `head` or `3.qkv`."""
    parts: tuple[TensorInfo, ...]
    turned: bool = False
    """Its parts are stored as [in, out], and stand side by side."""
    exact: bool = False
    """It is never kept in fewer bits than bfloat16 has, nor compressed."""

    @property
    def inputs(self) -> int:
        return self.parts[0].shape[0 if self.turned else 1]

    @property
    def columns(self) -> int:
        return sum(part.shape[1 if self.turned else 0] for part in self.parts)

    def joined(self, read: Callable[[TensorInfo], Tensor]) -> Tensor:
        """[in, out], contiguous; `read` brings a part."""
        stored = torch.cat([read(part) for part in self.parts], 1 if self.turned else 0)
        return stored.contiguous() if self.turned else stored.t().contiguous()


Keep = Callable[[Stack, Callable[[], Tensor], Tensor | None], tuple[Matrix, Tensor | None]]
"""Turns a matrix and its bias into the form to keep; the function reads the matrix, [in, out], into new memory."""


def as_it_is(_: Stack, matrix: Callable[[], Tensor], bias: Tensor | None) -> tuple[Matrix, Tensor | None]:
    """Keeps the matrix and its bias as tensors."""
    return matrix(), bias
