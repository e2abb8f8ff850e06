"""The compute capability that each kind of weights needs. Pure."""

from __future__ import annotations

_LEAST = {"float32": (0, 0), "bfloat16": (8, 0), "int8": (8, 0), "float8": (8, 9)}
"""The least compute capability, by the type of the weights."""


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
