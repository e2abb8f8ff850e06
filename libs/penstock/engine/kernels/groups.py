"""Numbers in 4 bits with a scale for each group: what of a checkpoint is kept as it is, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.checkpoint import TensorInfo

GROUP = 32
"""Inputs of a column that have one scale."""
NOT_KEPT = (
    f"keeps groups of {GROUP} numbers or a multiple, with scales in bfloat16, and this model's are not so: "
    "use int8 or bfloat16"
)
"""Why int4 is refused where `keeps_stored` is false."""


def keeps_numbers(info: TensorInfo) -> bool:
    """Whether int4 keeps a stored matrix as it is: in 4 bits, with bfloat16 scales for whole groups of a row."""
    scale, (rows, columns) = info.scale, info.grid
    return (
        info.dtype == "I4"
        and scale is not None
        and scale.dtype == "BF16"
        and rows == 1
        and columns % GROUP == info.phase[1] % GROUP == 0
    )


def keeps_stored(tensors: Iterable[TensorInfo]) -> bool:
    """Whether int4 keeps those that are stored in 4 bits, if there are any."""
    return all(keeps_numbers(info) for info in tensors if info.dtype == "I4")
