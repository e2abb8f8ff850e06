"""A packed matrix that multiplies."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.machine import Machine, linear_args
from penstock.engine.kernels.cpu.pack import pack
from penstock.engine.kernels.cpu.packed import LANES, Packed

_TALL_ROWS = 128
"""From here on torch may take over, see `torch_multiplies`."""
_PIECE = 64
"""Panels that torch gets at a time, as bfloat16."""


class PackedMatrix:
    """[in, columns], kept packed, with its bias. Takes and gives float32 rows.

    The result of a row does not depend on the other rows; where torch takes over (see `product`), as long as their
    number stays on one side of _TALL_ROWS.
    """

    def __init__(self, machine: Machine, matrix: Tensor, bias: Tensor | None, kind: str) -> None:
        self._begin(machine, pack(matrix, kind), bias, matrix.shape[1])

    @classmethod
    def of(cls, machine: Machine, packed: Packed, bias: Tensor | None, columns: int) -> PackedMatrix:
        """Of a matrix that is packed already."""
        made = object.__new__(cls)
        made._begin(machine, packed, bias, columns)
        return made

    def _begin(self, machine: Machine, packed: Packed, bias: Tensor | None, columns: int) -> None:
        if bias is not None:
            bias = torch.nn.functional.pad(bias.float(), (0, packed.outputs - bias.shape[0]))
        self._set(machine, packed, bias, columns)

    def _set(self, machine: Machine, packed: Packed, bias: Tensor | None, columns: int) -> None:
        self._machine = machine
        self._packed = packed
        self._bias = bias
        self._skipped = 0
        self.shape = (packed.inputs, columns)
        self.args = linear_args(packed, bias)
        """For the library."""

    @property
    def kind(self) -> str:
        """See Packed."""
        return self._packed.kind

    def columns(self, first: int, last: int) -> PackedMatrix:
        """A view of some columns. Whole panels are multiplied, so multiples of 16 waste nothing."""
        first, last = first + self._skipped, last + self._skipped
        part = self._packed.panels(first // LANES, -(-last // LANES))
        begin = first // LANES * LANES
        bias = None if self._bias is None else self._bias[begin : begin + part.outputs]
        view = object.__new__(PackedMatrix)
        view._set(self._machine, part, bias, last - first)
        view._skipped = first - begin
        return view

    def product(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, columns]."""
        x = x.contiguous()
        if torch_multiplies(self._machine, self._packed.kind, x.shape[0]):
            result = self._by_torch(x.bfloat16())
        else:
            result = self._machine.linear(x, self.args)
        return result[:, self._skipped : self._skipped + self.shape[1]]

    def _by_torch(self, x: Tensor) -> Tensor:
        """A piece of the matrix at a time, so that it is never there twice."""
        panels = self._packed.outputs // LANES
        result = torch.empty(x.shape[0], self._packed.outputs)
        room = torch.empty(self._packed.inputs * LANES * min(_PIECE, panels))
        for first in range(0, panels, _PIECE):
            last = min(first + _PIECE, panels)
            piece = self._machine.unpack(self.args, first, last, room).bfloat16()
            result[:, first * LANES : last * LANES] = torch.mm(x, piece)
        return result if self._bias is None else result.add_(self._bias)


def torch_multiplies(machine: Machine, kind: str, rows: int) -> bool:
    """Whether torch multiplies so many rows faster than the kernels: where it does so in bfloat16, for weights that are
    bfloat16 anyway."""
    return rows >= _TALL_ROWS and kind in ("bfloat16", "lossless") and multiplies_bfloat16(machine)


@functools.cache
def multiplies_bfloat16(machine: Machine) -> bool:
    """Whether torch's bfloat16 product beats the kernels here, which is so on processors with instructions for it:
    measured, at the first use."""
    matrix = PackedMatrix(machine, torch.ones(512, 512), None, "bfloat16")
    x = torch.ones(_TALL_ROWS, 512)
    torchs, kernels = math.inf, math.inf
    for _ in range(8):  # in turns, as others may be computing too
        torchs = min(torchs, _seconds(lambda: matrix._by_torch(x.bfloat16())))
        kernels = min(kernels, _seconds(lambda: machine.linear(x, matrix.args)))
    return torchs < kernels


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
