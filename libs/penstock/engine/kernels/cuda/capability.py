"""The compute capability that each kind of weights needs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_LEAST = {"float32": (0, 0), "bfloat16": (8, 0), "int8": (8, 0), "float8": (8, 9)}
"""The least compute capability, by the type of the weights."""


_GROUPED = (9, 10)
"""Major compute capabilities for which torch has grouped products whose groups the device alone counts; for others it
multiplies group by group, and the host waits."""
_UNIT = 8
"""They need rows of whole 16 bytes of bfloat16."""


def ungrouped(dtype: str, sizes: Sequence[int], capability: tuple[int, int]) -> str | None:
    """Why a device of this capability can't multiply experts of these sizes by one product for all of them; None when
    it can. `dtype` is that of the matrices, such as bfloat16."""
    if capability[0] not in _GROUPED:
        return f"compute capability {'.'.join(map(str, capability))} has no grouped products, only 9 and 10 have"
    if dtype != "bfloat16":
        return f"grouped products are of bfloat16, not of {dtype}"
    odd = [size for size in sizes if size % _UNIT]
    return f"grouped products need sizes that are multiples of {_UNIT}, not {odd[0]}" if odd else None


def check_dtype(dtype: str, capability: tuple[int, int]) -> None:
    """Raises ValueError when a device of this capability can't compute with weights of this type."""
    if capability >= _LEAST[dtype]:
        return
    able = [name for name, least in _LEAST.items() if capability >= least]
    wanted, found = (".".join(map(str, pair)) for pair in (_LEAST[dtype], capability))
    instead = " or ".join(able)
    raise ValueError(
        f"dtype {dtype} needs compute capability {wanted} or later, this device has {found}: use {instead}"
    )
