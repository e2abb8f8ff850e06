"""A matrix in the order in which the kernels read it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

LANES = 16
"""The number of columns in a panel."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed matrix. `data` is contiguous [panels, ...]."""

    kind: str
    """float32, bfloat16, int8, int4, or lossless (see lossless.py)."""
    inputs: int
    outputs: int
    """Rounded up to whole panels; the added columns are zero."""
    data: Tensor
    scale: Tensor | None = None
    """float32 [outputs]; only of int8."""
    start: Tensor | None = None
    """int64 [panels]; only of lossless: where each panel begins in `data`."""
    parts: Tensor | None = None
    """uint8 [2, 16]; only of lossless: upper and lower bits of the palette's exponents."""

    def panels(self, first: int, last: int) -> Packed:
        """A view of the panels [first, last)."""
        wide = slice(first * LANES, last * LANES)
        return Packed(
            self.kind,
            self.inputs,
            wide.stop - wide.start,
            self.data if self.start is not None else self.data[first:last],
            None if self.scale is None else self.scale[wide],
            None if self.start is None else self.start[first:last],
            self.parts,
        )
