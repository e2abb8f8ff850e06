"""Kernels of packed rows in C++, for processors that multiply bfloat16 by themselves (AVX-512, AMX) and where there is
g++.

The source is compiled once for an instruction set, and the library kept where only this user can write. It has no
OpenMP of its own: its loops run on the threads of torch. Before it is used it has to agree with torch on an example.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.build import instruction_sets
from penstock.runtime.caches import cache_directory
from penstock.runtime.private import locked

from .cuda import CudaKernels
from .data import Spans
from .net import NetShape, Norm, rotary
from .packed import Kernels, TorchKernels

_SOURCE = Path(__file__).parent / "packed.cpp"
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fopenmp", "-march=x86-64-v4", "-mavx512bf16")
_TARGETS: Mapping[str, tuple[str, ...]] = MappingProxyType({"amx": ("-mamx-tile", "-mamx-bf16"), "avx512_bf16": ()})
_FUNCTIONS = ("attention", "attention_back", "norm", "norm_back", "gate", "gate_back", "cross_entropy")


def kernels_for(shape: NetShape, device: torch.device) -> Kernels:
    """The fastest kernels for a network: compiled ones if they fit it and can be had, else those of torch."""
    if device.type == "cuda":
        return CudaKernels()
    fast = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    fits = (
        shape.head == 64 and shape.heads == shape.kv_heads and not (shape.width | shape.inner | shape.vocabulary) % 16
    )
    if fits and (found := library()) is not None:
        return NativeKernels(found)
    return TorchKernels(torch.bfloat16 if fast else torch.float32)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The best compiled kernels; None where there is no compiler, no processor that runs them, or they compute
    something else than torch."""
    for isa in instruction_sets():
        if isa in _TARGETS:
            try:
                found = load(built(cache_directory("training"), _TARGETS[isa]))
            except (OSError, subprocess.SubprocessError):
                continue
            if difference(NativeKernels(found)) < _CLOSE:
                return found
    return None


def load(path: Path) -> ctypes.CDLL:
    """The functions of a library. OSError: it can't be loaded, as where torch has no GNU OpenMP."""
    found = ctypes.CDLL(str(path), os.RTLD_NOW)
    for name in _FUNCTIONS:
        getattr(found, f"penstock_{name}").restype = None
    return found


def built(directory: Path, flags: Sequence[str]) -> Path:
    """The library in `directory`, which is made if it is not there. Raises OSError and SubprocessError."""
    flags = (*_FLAGS, *flags)
    digest = hashlib.sha256(repr(flags).encode() + _SOURCE.read_bytes())
    path = directory / f"packed-{digest.hexdigest()[:24]}.so"
    compiler = os.environ.get("CXX") or shutil.which("g++")
    with locked(directory):
        if path.exists():
            return path
        if compiler is None:
            raise FileNotFoundError("there is no C++ compiler")
        with tempfile.TemporaryDirectory(dir=directory) as room:
            part = Path(room) / "packed.o"
            run = functools.partial(subprocess.run, check=True, capture_output=True, timeout=300)
            run([compiler, *flags, "-c", str(_SOURCE), "-o", str(part)])
            # without -fopenmp: its functions are found in the library that torch has loaded
            run([compiler, "-shared", str(part), "-o", str(part.with_suffix(".so"))])
            os.replace(part.with_suffix(".so"), path)
    return path


_CLOSE = 0.01
"""Twice what rounding to bfloat16 makes of it."""
_LENGTHS = (1, 16, 17, 40, 64, 97, 150)


def difference(kernels: NativeKernels) -> float:
    """How far attention and its gradient are from those of torch in float32, relative to their size: the larger."""
    shape = NetShape(layers=1, width=128, inner=16, heads=2, kv_heads=2)
    generator = torch.Generator().manual_seed(0)
    qkv, gradient = (torch.randn(sum(_LENGTHS), n, generator=generator).bfloat16() for n in (384, 128))
    found: list[tuple[Tensor, Tensor]] = []
    for given, dtype in ((kernels, torch.bfloat16), (TorchKernels(torch.float32), torch.float32)):
        rows = qkv.to(dtype).detach().requires_grad_()
        out = given.attention(rows, Spans.of(_LENGTHS), shape)
        out.backward(gradient.to(dtype))  # type: ignore[no-untyped-call]
        assert rows.grad is not None
        found.append((out.detach().float(), rows.grad.float()))
    ratios = [float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]
    return math.inf if any(map(math.isnan, ratios)) else max(ratios)


def _call(function: ctypes._NamedFuncPointer, *arguments: Tensor | int | float | None) -> None:
    """Calls a kernel; tensors have to be as it takes them."""
    passed: list[ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float] = []
    for argument in arguments:
        match argument:
            case Tensor():
                assert argument.is_contiguous()
                passed.append(ctypes.c_void_p(argument.data_ptr()))
            case None:
                passed.append(ctypes.c_void_p(None))
            case int():
                passed.append(ctypes.c_int64(argument))
            case _:
                passed.append(ctypes.c_float(argument))
    function(*passed)


class NativeKernels:
    """Compiled kernels; products in bfloat16."""

    dtype = torch.bfloat16

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def norm(self, x: Tensor, change: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        total, normed = _Norm.apply((self.library, norm.epsilon), x, change, norm.weight)  # type: ignore[no-untyped-call]
        return total, normed

    def attention(self, qkv: Tensor, spans: Spans, shape: NetShape) -> Tensor:
        out: Tensor = _Attention.apply(self.library, qkv, spans, shape)  # type: ignore[no-untyped-call]
        return out

    def gate(self, both: Tensor) -> Tensor:
        out: Tensor = _Gate.apply(self.library, both)  # type: ignore[no-untyped-call]
        return out

    def cross_entropy(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        loss: Tensor = _CrossEntropy.apply(self.library, logits, targets, weights)  # type: ignore[no-untyped-call]
        return loss


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, by: tuple[ctypes.CDLL, float], x: Tensor, change: Tensor | None, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.library, epsilon = by
        rows, width = x.shape
        total = x.view_as(x) if change is None else torch.empty_like(x)
        normed, inverse = torch.empty(rows, width, dtype=torch.bfloat16), torch.empty(rows)
        _call(ctx.library.penstock_norm, x, change, weight, epsilon, rows, width, total, normed, inverse)
        ctx.added = change is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, weight, inverse)
        return total, normed

    @staticmethod
    def backward(ctx: Any, besides: Tensor | None, normed_gradient: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, inverse = ctx.saved_tensors
        rows, width = total.shape
        gradient, narrowed = torch.empty_like(total), torch.empty(rows, width, dtype=torch.bfloat16)
        weight_gradient = torch.empty_like(weight)
        _call(
            ctx.library.penstock_norm_back,
            normed_gradient.contiguous(),
            None if besides is None else besides.contiguous(),
            total,
            weight,
            inverse,
            rows,
            width,
            gradient,
            narrowed,
            weight_gradient,
        )
        return None, gradient, narrowed if ctx.added else None, weight_gradient


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, qkv: Tensor, spans: Spans, shape: NetShape) -> Tensor:
        first = spans.bounds.long()
        order = first.diff().argsort(descending=True)
        cos, sin = rotary(shape, 0, spans.longest, qkv.device)
        out = torch.empty(len(qkv), shape.heads * shape.head, dtype=torch.bfloat16)
        logs = torch.empty(shape.heads, len(qkv))
        _call(library.penstock_attention, qkv, first, order, len(order), shape.heads, cos, sin, out, logs)
        ctx.library, ctx.heads = library, shape.heads
        ctx.save_for_backward(qkv, first, order, cos, sin, out, logs)
        return out

    @staticmethod
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        qkv, first, order, cos, sin, out, logs = ctx.saved_tensors
        gradient = torch.empty_like(qkv)
        _call(
            ctx.library.penstock_attention_back,
            qkv,
            first,
            order,
            len(order),
            ctx.heads,
            cos,
            sin,
            out,
            logs,
            out_gradient.contiguous(),
            gradient,
        )
        return None, gradient, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, both: Tensor) -> Tensor:
        rows, inner = both.shape[0], both.shape[1] // 2
        out = torch.empty(rows, inner, dtype=torch.bfloat16)
        _call(library.penstock_gate, both, rows, inner, out)
        ctx.library = library
        ctx.save_for_backward(both)
        return out

    @staticmethod
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        (both,) = ctx.saved_tensors
        gradient = torch.empty_like(both)
        rows, inner = both.shape[0], both.shape[1] // 2
        _call(ctx.library.penstock_gate_back, both, out_gradient.contiguous(), rows, inner, gradient)
        return None, gradient


class _CrossEntropy(torch.autograd.Function):
    """The gradient is made together with the loss, where the logits were."""

    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        losses = torch.empty(len(logits))
        _call(library.penstock_cross_entropy, logits, targets, weights, *logits.shape, losses)
        ctx.save_for_backward(logits)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (found,) = ctx.saved_tensors
        return None, found if gradient.item() == 1.0 else found * gradient, None, None
