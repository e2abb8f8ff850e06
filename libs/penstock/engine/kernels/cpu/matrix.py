"""A packed matrix that multiplies."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.layout import LinearArgs
from penstock.engine.kernels.cpu.machine import Machine, linear_args
from penstock.engine.kernels.cpu.pack import pack
from penstock.engine.kernels.cpu.packed import LANES, Packed

_TALL_ROWS = 128
"""The number of rows from which torch may multiply, see `PackedMatrix.by_torch`."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A matrix [in, columns], kept packed, with its bias. It takes and returns rows of float32.

    The result of a row does not depend on the other rows. Where torch multiplies many rows (see `by_torch`), this holds
    as long as the number of rows stays on one side of _TALL_ROWS.
    """

    machine: Machine
    packed: Packed
    bias: Tensor | None
    """float32 [packed.outputs]."""
    first: int
    """Which of the packed columns is the first column of this matrix."""
    shape: tuple[int, int]
    args: LinearArgs = field(init=False)
    """The library's arguments, for all packed columns."""
    _tall: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", linear_args(self.packed, self.bias))
        bfloat16 = self.packed.kind in ("bfloat16", "lossless")
        object.__setattr__(self, "_tall", bfloat16 and self.machine.torch_multiplies_bfloat16)

    @classmethod
    def pack(cls, machine: Machine, matrix: Tensor, bias: Tensor | None, kind: str) -> PackedMatrix:
        """Packs a matrix [in, columns] as `kind`, see Packed."""
        return cls.of(machine, pack(matrix, kind), bias, matrix.shape[1])

    @classmethod
    def of(cls, machine: Machine, packed: Packed, bias: Tensor | None, columns: int) -> PackedMatrix:
        """Makes one from a matrix that is packed already; `bias` is [columns]."""
        if bias is not None:
            bias = torch.nn.functional.pad(bias.float(), (0, packed.outputs - columns))
        return cls(machine, packed, bias, 0, (packed.inputs, columns))

    @property
    def kind(self) -> str:
        """How its numbers are kept: float32, bfloat16, int8, int4 or lossless."""
        return self.packed.kind

    def dense(self) -> Tensor:
        """All of it as float32 [in, columns], in new memory."""
        panels = self.packed.outputs // LANES
        found = self.machine.unpack(self.args, 0, panels, torch.empty(self.packed.inputs * self.packed.outputs))
        return found[:, self.first : self.first + self.shape[1]]

    def columns(self, first: int, last: int) -> PackedMatrix:
        """A view of the columns [first, last). Whole panels are multiplied, so multiples of 16 waste nothing."""
        first, last = first + self.first, last + self.first
        panel = first // LANES
        part = self.packed.panels(panel, -(-last // LANES))
        bias = None if self.bias is None else self.bias[panel * LANES : panel * LANES + part.outputs]
        return PackedMatrix(self.machine, part, bias, first % LANES, (part.inputs, last - first))

    def by_torch(self, rows: int) -> bool:
        """Whether torch multiplies so many rows: only weights that are bfloat16 anyway, and only where torch is faster
        than the kernels."""
        return self._tall and rows >= _TALL_ROWS

    def product(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, columns]."""
        x = x.contiguous()
        multiply = self.machine.linear_by_torch if self.by_torch(x.shape[0]) else self.machine.linear
        return multiply(x, self.args)[:, self.first : self.first + self.shape[1]]
