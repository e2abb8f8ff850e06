"""The compiled library as Python sees it: threads, and matrices for them."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, Structure, c_float, c_int32, c_void_p

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.build import library
from penstock.engine.kernels.cpu.packed import LANES, Packed

KINDS = {"float32": 0, "bfloat16": 1, "int8": 2, "lossless": 3}


class LinearArgs(Structure):
    """`Linear` of kernels.h."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "inputs", "outputs", "unused")),
        *((name, c_void_p) for name in ("data", "scale", "bias", "start", "parts")),
    )


class LayerArgs(Structure):
    """`Layer` of kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "qk_norm", "mlp_norm")),
        *((name, LinearArgs) for name in ("qkv", "output", "gate_up", "down")),
        ("window", c_int32),
        ("unused", c_int32),
    )


class ModelArgs(Structure):
    """`Model` of kernels.h."""

    _fields_ = (
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        ("eps", c_float),
        ("scale", c_float),
        *((name, c_int32) for name in ("kv_kind", "block_size", "vocab")),
        *((name, c_void_p) for name in ("cosine", "sine", "norm")),
        ("layer", POINTER(LayerArgs)),
        ("head", LinearArgs),
        ("table", c_void_p),
        ("table_kind", c_int32),
        ("pool", c_void_p),
    )


class StepArgs(Structure):
    """`Step` of kernels.h."""

    _fields_ = (
        *((name, c_int32) for name in ("rows", "sequences", "samples", "unused")),
        *(
            (name, c_void_p)
            for name in ("first", "position", "table", "table_at", "sampled", "ids", "x", "logits", "best")
        ),
    )


class Machine:
    """The threads that compute, and the library that they run. One caller at a time.

    The threads end with the object.
    """

    def __init__(self, threads: int, isa: str = "") -> None:
        """`isa`: one of `instruction_sets`, the best where it is empty. Raises NotBuilt."""
        self._library = library(isa)
        for name, result, arguments in (
            ("open", c_void_p, (c_int32,)),
            ("rounds", c_int32, (c_int32,)),
            ("close", None, (c_void_p,)),
            ("forward", None, (c_void_p, POINTER(ModelArgs), POINTER(StepArgs))),
            ("attend", None, (c_void_p, POINTER(ModelArgs), POINTER(StepArgs), c_void_p, c_void_p)),
            ("linear", None, (c_void_p, POINTER(LinearArgs), c_void_p, c_int32, c_void_p)),
            ("unpack", None, (c_void_p, POINTER(LinearArgs), c_int32, c_int32, c_void_p)),
        ):
            function = getattr(self._library, f"penstock_{name}")
            function.restype, function.argtypes = result, arguments
        self._handle = self._library.penstock_open(threads)
        weakref.finalize(self, self._library.penstock_close, self._handle)

    def rounds(self, kind: str) -> bool:
        """Whether rows are rounded to bfloat16 before a matrix of this kind multiplies them: where the processor has
        products of bfloat16, for all kinds but float32. Sums are float32 everywhere."""
        return bool(self._library.penstock_rounds(KINDS[kind]))

    def linear(self, x: Tensor, matrix: LinearArgs) -> Tensor:
        """float32 [rows, in] -> [rows, outputs], bias included."""
        if x.dtype != torch.float32 or not x.is_contiguous() or x.shape[1] != matrix.inputs:
            raise ValueError(f"rows of {matrix.inputs} float32 are wanted, not {list(x.shape)} of {x.dtype}")
        result = torch.empty(x.shape[0], matrix.outputs)
        self._library.penstock_linear(self._handle, ctypes.byref(matrix), x.data_ptr(), x.shape[0], result.data_ptr())
        return result

    def unpack(self, matrix: LinearArgs, first: int, last: int, room: Tensor) -> Tensor:
        """The panels [first, last) as float32 [in, 16 * (last - first)], in `room`."""
        piece = room[: matrix.inputs * LANES * (last - first)].view(matrix.inputs, -1)
        self._library.penstock_unpack(self._handle, ctypes.byref(matrix), first, last, piece.data_ptr())
        return piece

    def attend(self, model: ModelArgs, step: StepArgs, qkv: Tensor, mixed: Tensor) -> None:
        """Layer 0's attention alone: float32 [rows, (heads + 2 kv_heads) head_dim] -> [rows, heads head_dim].

        Stores the rows' keys and values in the pool first.
        """
        args = ctypes.byref(model), ctypes.byref(step), qkv.data_ptr(), mixed.data_ptr()
        self._library.penstock_attend(self._handle, *args)

    def forward(self, model: ModelArgs, step: StepArgs) -> None:
        """One step, see CompiledDecoder."""
        self._library.penstock_forward(self._handle, ctypes.byref(model), ctypes.byref(step))


def linear_args(packed: Packed, bias: Tensor | None) -> LinearArgs:
    """`packed` and `bias` (float32 [packed.outputs]) for the library; the caller keeps both alive."""
    pointers = (packed.data, packed.scale, bias, packed.start, packed.parts)
    addresses = (None if values is None else values.data_ptr() for values in pointers)
    return LinearArgs(KINDS[packed.kind], packed.inputs, packed.outputs, 0, *addresses)
