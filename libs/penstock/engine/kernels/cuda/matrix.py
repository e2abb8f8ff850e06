"""Matrices that a device keeps in 8 bits, multiplied by torch's own products.

With int8 only the weights are rounded, and activations stay bfloat16. With float8 (e4m3) torch's scaled product takes
both sides in 8 bits, so each row of activations is rounded too; it has a scale of its own, which keeps rows independent
of each other. Both types have one scale per output column.

This is written against torch's interface and checked on a CPU, where torch has the same products; it has not run on a
GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.engine.kernels.rounding import quantised

_LARGEST = 448.0
"""The largest number in float8_e4m3fn."""
_THIN_ROWS = 16
"""Up to this many rows use torch's int8 product, which reads the weights about once for each row. For more rows the
weights are converted to bfloat16 first."""
_UNIT = 16
"""torch's scaled product needs sizes that are multiples of this."""


class Int8Matrix:
    """[in, out] with its bias, kept as int8 [out, in]. Takes and gives bfloat16."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, thin: bool) -> None:
        """`scale` is bfloat16 [out]; `thin` says whether torch's int8 product works on the device."""
        self._weight, self._scale, self._bias, self._thin = weight, scale, bias, thin
        self.shape = (weight.shape[1], weight.shape[0])

    @classmethod
    def of(cls, matrix: Tensor, bias: Tensor | None, thin: bool) -> Int8Matrix:
        """Rounds a matrix [in, out]."""
        numbers, scale = quantised(matrix)
        return cls(numbers.t().contiguous(), scale.to(torch.bfloat16), bias, thin)

    def product(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        if self._thin and x.shape[0] <= _THIN_ROWS:
            result = torch._weight_int8pack_mm(x.contiguous(), self._weight, self._scale)
        else:
            result = torch.mm(x, self._weight.to(x.dtype).t()).mul_(self._scale)
        return result if self._bias is None else result.add_(self._bias)

    def columns(self, first: int, last: int) -> Int8Matrix:
        """A view of some columns."""
        bias = None if self._bias is None else self._bias[first:last]
        return Int8Matrix(self._weight[first:last], self._scale[first:last], bias, self._thin)


class Float8Matrix:
    """[in, out] with its bias, kept as float8 [out, in]. Takes and gives bfloat16."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        """`scale` is float32 [1, out]."""
        self._weight, self._scale, self._bias = weight, scale, bias
        self.shape = (weight.shape[1], weight.shape[0])

    @classmethod
    def of(cls, matrix: Tensor, bias: Tensor | None) -> Float8Matrix:
        """Rounds a matrix [in, out]; see `fits`."""
        weight, scale = _rounded(matrix.t())
        return cls(weight, scale.view(1, -1), bias)

    @staticmethod
    def fits(matrix: Tensor) -> bool:
        """Whether the product takes such a matrix."""
        return all(size % _UNIT == 0 for size in matrix.shape)

    def product(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        rounded, scale = _rounded(x)
        result = torch._scaled_mm(
            rounded, self._weight.t(), scale_a=scale, scale_b=self._scale, out_dtype=torch.bfloat16
        )
        return result if self._bias is None else result.add_(self._bias)

    def columns(self, first: int, last: int) -> Float8Matrix:
        """A view of some columns; both are multiples of 16."""
        bias = None if self._bias is None else self._bias[first:last]
        return Float8Matrix(self._weight[first:last], self._scale[:, first:last].contiguous(), bias)


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds each row by a scale of its own: (float8, contiguous; scales, float32 [rows, 1])."""
    wide = rows.float()
    scale = wide.abs().amax(1, keepdim=True).clamp_(min=1e-12).div_(_LARGEST)
    return (wide / scale).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).contiguous(), scale


def refusal(product: Callable[[Tensor, Tensor], Tensor], device: torch.device, tolerance: float) -> str | None:
    """What is wrong with `product` (of x and matrix [in, out]) on this device; None when it is right. `tolerance` is
    how much it may be off, as a share of the largest result."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 64, generator=generator).to(device, torch.bfloat16)
    matrix = torch.randn(64, 48, generator=generator).to(device, torch.bfloat16)
    try:
        off = (product(x, matrix).float() - x.float() @ matrix.float()).abs().max()
    except Exception as error:  # a build of torch that lacks the product may raise anything
        return f"{type(error).__name__}: {error}"
    share = float(off / (x.float() @ matrix.float()).abs().max())
    return None if share <= tolerance else f"it is off by {share:.2g} of the largest result"
