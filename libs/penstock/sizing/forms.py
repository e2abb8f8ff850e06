"""How the numbers of a tensor are kept, and what they take."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.checkpoint import TensorInfo
from penstock.checkpoint.quantised import Quantisation
from penstock.checkpoint.tensors import DTYPE_BYTES

ROW = 1 << 62
"""In a grid: as many columns as there are."""


@dataclass(frozen=True, slots=True)
class NumberForm:
    """So many bits for each number, and `scale_bytes` for each piece of `grid`, rows and columns, that has one scale;
    0: there are no scales."""

    bits: int
    grid: tuple[int, int] = (1, 1)
    scale_bytes: int = 0

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix [rows, columns], its scales included."""
        return self.number_bytes(rows, columns) + self.scale_count(rows, columns) * self.scale_bytes

    def number_bytes(self, rows: int, columns: int) -> int:
        """Bytes of the numbers alone."""
        return -(-rows * columns * self.bits // 8)

    def scale_count(self, rows: int, columns: int) -> int:
        """Scales of a matrix [rows, columns], as if it had any."""
        return -(-rows // self.grid[0]) * -(-columns // self.grid[1])

    @property
    def quantised(self) -> bool:
        """Whether there are scales."""
        return self.scale_bytes > 0


FLOAT32, BITS_16 = NumberForm(32), NumberForm(16)
ROWS_OF_8 = NumberForm(8, (1, ROW), 4)
"""8 bits, and a float32 for each row of [out, in], as the engine rounds to int8 and float8."""
GROUPS_OF_4 = NumberForm(4, (1, 32), 2)
"""4 bits, and a bfloat16 for 32 numbers of each row, as the engine rounds to int4."""


def plain_form(dtype: str) -> NumberForm:
    """Of a dtype of safetensors: F32, BF16 or F16."""
    return NumberForm(8 * DTYPE_BYTES[dtype])


def quantised_form(quantisation: Quantisation) -> NumberForm:
    """With the scales that published checkpoints have: float32 for blocks of float8, bfloat16 for groups of int4."""
    if quantisation.kind == "float8":
        return NumberForm(8, quantisation.grid, 4)
    return NumberForm(4, quantisation.grid, 2)


def stored_form(info: TensorInfo) -> NumberForm:
    """Of a tensor whose header was read."""
    if info.scale is None:
        return plain_form(info.dtype)
    return NumberForm(4 if info.dtype == "I4" else 8, info.grid, DTYPE_BYTES[info.scale.dtype])
