"""A packed matrix that multiplies."""

from __future__ import annotations

import functools
import time

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.machine import Machine, linear_args
from penstock.engine.kernels.cpu.pack import LANES, Packed, pack, unpack

THIN_ROWS = 32
"""Products of more rows go through torch, which gets the matrix a piece at a time as floats."""
_PIECE_BYTES = 4 << 20


class PackedMatrix:
    """[in, columns], kept packed, with its bias. Takes and gives float32 rows.

    The result of a row does not depend on the other rows, as long as their number stays on one side of THIN_ROWS.
    """

    def __init__(self, machine: Machine, matrix: Tensor, bias: Tensor | None, kind: str) -> None:
        packed = pack(matrix, kind)
        if bias is not None:
            bias = torch.nn.functional.pad(bias.float(), (0, packed.outputs - bias.shape[0]))
        self._set(machine, packed, bias, matrix.shape[1])

    def _set(self, machine: Machine, packed: Packed, bias: Tensor | None, columns: int) -> None:
        self._machine = machine
        self._packed = packed
        self._bias = bias
        self.shape = (packed.inputs, columns)
        self.args = linear_args(packed, bias)
        """For the library."""

    def columns(self, first: int, last: int) -> PackedMatrix:
        """A view of some columns; `first` is a multiple of 16."""
        if first % LANES:
            raise ValueError(f"columns begin at a multiple of {LANES}, not at {first}")
        panels = slice(first // LANES, -(-last // LANES))
        wide = slice(first, -(-last // LANES) * LANES)
        packed = self._packed
        part = Packed(
            packed.kind,
            packed.inputs,
            wide.stop - wide.start,
            packed.data[panels],
            None if packed.scale is None else packed.scale[wide],
        )
        view = object.__new__(PackedMatrix)
        view._set(self._machine, part, None if self._bias is None else self._bias[wide], last - first)
        return view

    def product(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, columns]."""
        x = x.contiguous()
        if x.shape[0] <= THIN_ROWS:
            return self._machine.linear(x, self.args)[:, : self.shape[1]]
        return self._tall(x)

    def _tall(self, x: Tensor) -> Tensor:
        if self._packed.kind == "bfloat16" and multiplies_bfloat16():
            result = torch.mm(x.bfloat16(), unpack(self._packed, self.shape[1])).float()
            return result if self._bias is None else result + self._bias[: self.shape[1]]
        result = torch.empty(x.shape[0], self._packed.outputs)
        panels = self._packed.outputs // LANES
        step = max(1, _PIECE_BYTES // (self._packed.inputs * LANES * 4))
        room = torch.empty(self._packed.inputs * LANES * min(step, panels))
        for first in range(0, panels, step):
            last = min(first + step, panels)
            torch.mm(x, self._machine.unpack(self.args, first, last, room), out=result[:, first * LANES : last * LANES])
        if self._bias is not None:
            result += self._bias
        return result[:, : self.shape[1]]


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether torch's bfloat16 product beats float32 here: measured, since processors that lack it emulate it."""
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        x, matrix = torch.ones(128, 256, dtype=dtype), torch.ones(256, 256, dtype=dtype)
        torch.mm(x, matrix)
        begin = time.perf_counter()
        torch.mm(x, matrix)
        seconds.append(time.perf_counter() - begin)
    return seconds[1] < seconds[0]
