"""The compiled library for Python: its threads, and the products that they compute."""

from __future__ import annotations

import ctypes
import logging
import math
import time
import weakref
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.build import instruction_sets, library
from penstock.engine.kernels.cpu.layout import Kind, LinearArgs, ModelArgs, StepArgs
from penstock.engine.kernels.cpu.pack import pack
from penstock.engine.kernels.cpu.packed import LANES, Packed

_PIECE = 64
"""Panels that are unpacked for torch at a time."""
_SAMPLE, _SAMPLE_ROWS, _ROUNDS = 512, 128, 8
"""The size of the products that are timed: inputs and columns, rows; and how often they are repeated."""
_CLEARLY = 0.8
"""Torch is clearly faster when it takes at most this share of the kernels' time."""
_log = logging.getLogger(__name__)


class Machine:
    """The threads that compute, and the library that they run. One caller at a time.

    The threads end with the object.
    """

    def __init__(self, threads: int, isa: str = "") -> None:
        """`isa` is one of `instruction_sets`; empty: the best. Raises NotBuilt."""
        self.isa = isa or instruction_sets()[0]
        self.threads = threads
        self._library = library(isa)
        self._handle = self._library.penstock_open(threads)
        weakref.finalize(self, self._library.penstock_close, self._handle)

    def rounds(self, kind: str) -> bool:
        """Whether rows are rounded to bfloat16 before they are multiplied with a matrix of this kind: if the processor
        multiplies bfloat16, for all kinds but float32. Sums are always float32."""
        return bool(self._library.penstock_rounds(Kind.of(kind)))

    def linear(self, x: Tensor, matrix: LinearArgs) -> Tensor:
        """Multiplies float32 [rows, in] -> [rows, outputs] and adds the bias."""
        if x.dtype != torch.float32 or not x.is_contiguous() or x.shape[1] != matrix.inputs:
            raise ValueError(f"rows of {matrix.inputs} float32 are wanted, not {list(x.shape)} of {x.dtype}")
        result = torch.empty(x.shape[0], matrix.outputs)
        self._library.penstock_linear(self._handle, ctypes.byref(matrix), x.data_ptr(), x.shape[0], result.data_ptr())
        return result

    def linear_by_torch(self, x: Tensor, matrix: LinearArgs) -> Tensor:
        """Does the same with torch, in bfloat16. The matrix is unpacked in pieces, so that memory never holds it
        twice."""
        rows, panels = x.bfloat16(), matrix.outputs // LANES
        result = torch.empty(x.shape[0], matrix.outputs)
        room = torch.empty(matrix.inputs * LANES * min(_PIECE, panels))
        for first in range(0, panels, _PIECE):
            last = min(first + _PIECE, panels)
            piece = self.unpack(matrix, first, last, room).bfloat16()
            result[:, first * LANES : last * LANES] = torch.mm(rows, piece)
        if matrix.bias.value is not None:
            result += _floats_at(matrix.bias.value, matrix.outputs)
        return result

    @cached_property
    def torch_multiplies_bfloat16(self) -> bool:
        """Whether `linear_by_torch` is clearly faster than `linear` for many rows of bfloat16 weights, measured once.

        It is faster where torch uses instructions for which there are no kernels. Torch is chosen only if it takes at
        most _CLEARLY of the kernels' time, so that noise does not decide: the two round differently, and two workers on
        one host should agree. This is measured when the first matrix is made, not in the middle of a prompt.
        """
        packed = pack(torch.ones(_SAMPLE, _SAMPLE), "bfloat16")
        matrix, x = linear_args(packed, None), torch.ones(_SAMPLE_ROWS, _SAMPLE)
        kernels, torchs = math.inf, math.inf
        for _ in range(_ROUNDS):  # in turns, because other processes may be computing too
            kernels = min(kernels, _seconds(lambda: self.linear(x, matrix)))
            torchs = min(torchs, _seconds(lambda: self.linear_by_torch(x, matrix)))
        chosen = torchs <= kernels * _CLEARLY
        _log.info(
            "bfloat16 products of many rows: by %s (kernels of %s %.2f ms, torch %.2f ms)",
            "torch" if chosen else "the kernels",
            self.isa,
            kernels * 1e3,
            torchs * 1e3,
        )
        return chosen

    def unpack(self, matrix: LinearArgs, first: int, last: int, room: Tensor) -> Tensor:
        """Unpacks the panels [first, last) to `room`, as float32 [in, 16 * (last - first)]."""
        piece = room[: matrix.inputs * LANES * (last - first)].view(matrix.inputs, -1)
        self._library.penstock_unpack(self._handle, ctypes.byref(matrix), first, last, piece.data_ptr())
        return piece

    def attend(self, model: ModelArgs, step: StepArgs, qkv: Tensor, mixed: Tensor) -> None:
        """Computes only the attention of layer 0: float32 [rows, (heads + 2 kv_heads) head_dim] -> [rows, heads
        head_dim].

        Stores the rows' keys and values in the page memory first.
        """
        args = ctypes.byref(model), ctypes.byref(step), qkv.data_ptr(), mixed.data_ptr()
        self._library.penstock_attend(self._handle, *args)

    def forward(self, model: ModelArgs, step: StepArgs) -> bool:
        """Computes one step for CompiledDecoder; False when another rank is lost."""
        return bool(self._library.penstock_forward(self._handle, ctypes.byref(model), ctypes.byref(step)))


def linear_args(packed: Packed, bias: Tensor | None) -> LinearArgs:
    """The arguments of the library for `packed` and `bias` (float32 [packed.outputs]); the caller keeps both alive."""
    pointers = (packed.data, packed.scale, bias, packed.start, packed.parts)
    addresses = (None if values is None else values.data_ptr() for values in pointers)
    return LinearArgs(Kind.of(packed.kind), packed.inputs, packed.outputs, *addresses)


def _floats_at(address: int, count: int) -> Tensor:
    """A view of `count` floats at `address`, which the caller keeps alive."""
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
