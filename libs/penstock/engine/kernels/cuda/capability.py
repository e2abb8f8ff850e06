"""The compute capability that each kind of weights needs. Pure."""

from __future__ import annotations

_LEAST = {"float32": (0, 0), "bfloat16": (8, 0), "int8": (8, 0), "float8": (8, 9)}
"""Compute capabilities."""


def check_dtype(dtype: str, capability: tuple[int, int]) -> None:
    """Raises ValueError when a device of this capability can't compute with weights kept so."""
    if capability >= _LEAST[dtype]:
        return
    able = [name for name, least in _LEAST.items() if capability >= least]
    wanted, found = (".".join(map(str, pair)) for pair in (_LEAST[dtype], capability))
    raise ValueError(
        f"dtype {dtype} needs compute capability {wanted} or later, this device has {found}: use {' or '.join(able)}"
    )
