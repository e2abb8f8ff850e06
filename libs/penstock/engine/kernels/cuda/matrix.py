"""Matrices kept in 8 bits on a device, through the products that torch has for them.

int8 is weight-only: activations stay bfloat16. float8 (e4m3) is not: torch's scaled product takes both sides in 8
bits, so each row of activations is rounded as well, to a scale of its own, which keeps rows independent of each other.
Both have one scale per output column.

Written against torch's interface, checked on a CPU where torch has the same products there; not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.engine.kernels.rounding import quantised

_LARGEST = 448.0
"""Of float8_e4m3fn."""
_THIN_ROWS = 16
"""torch's int8 product reads the weights once for each row or so; for more rows they are made bfloat16 first."""
_UNIT = 16
"""torch's scaled product wants sizes that are multiples of this."""


class Int8Matrix:
    """[in, out] with its bias, kept as int8 [out, in]. Takes and gives bfloat16."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, thin: bool) -> None:
        """`scale` is bfloat16 [out]; `thin`: the device has torch's product."""
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
    """(float8, contiguous, float32 [rows, 1]): each row to steps of its largest number."""
    wide = rows.float()
    scale = wide.abs().amax(1, keepdim=True).clamp_(min=1e-12).div_(_LARGEST)
    return (wide / scale).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).contiguous(), scale


def refusal(product: Callable[[Tensor, Tensor], Tensor], device: torch.device, tolerance: float) -> str | None:
    """What is wrong with a product (x, matrix [in, out]) on this device; None when it is right within `tolerance`, a
    share of the largest result."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 64, generator=generator).to(device, torch.bfloat16)
    matrix = torch.randn(64, 48, generator=generator).to(device, torch.bfloat16)
    try:
        off = (product(x, matrix).float() - x.float() @ matrix.float()).abs().max()
    except Exception as error:  # whatever a build of torch says of a product that it lacks
        return f"{type(error).__name__}: {error}"
    share = float(off / (x.float() @ matrix.float()).abs().max())
    return None if share <= tolerance else f"it is off by {share:.2g} of the largest result"
