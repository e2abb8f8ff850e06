"""Adapters as step.cpp reads them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import addressof, c_void_p
from typing import Any

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.layout import AdapterArgs, AdapterPartArgs, Kind
from penstock.engine.kernels.cpu.packed import LANES
from penstock.engine.layers.adapters import AdapterWeights, ThinProduct
from penstock.engine.step.batch import Rows

RANKS = 4
"""The kernels take so many ranks at once: others are filled up with zeros."""
_PRODUCTS = ("qkv", "out", "gate_up", "down", "query")
"""In the order of the kernels."""


class StepAdapter:
    """The arguments for one adapter, and the widest row of its shrunk numbers. They live as long as this object, which
    must not outlive the tensors."""

    def __init__(self, layers: Sequence[dict[str, tuple[ThinProduct, ...]]]) -> None:
        parts: list[AdapterPartArgs] = []
        begin, self.ranks, kind = [0], 0, Kind.FLOAT32
        for layer in layers:
            for product in _PRODUCTS:
                at = 0
                for thin in layer.get(product, ()):
                    panels, rank, _ = thin.up.shape
                    addresses = thin.down.data_ptr(), thin.up.data_ptr()
                    parts.append(AdapterPartArgs(*addresses, rank, thin.first // LANES, panels, at))
                    at += rank
                    kind = Kind.of(thin.down.dtype)
                begin.append(len(parts))
                self.ranks = max(self.ranks, at)
        kept = (AdapterPartArgs * len(parts))(*parts), array("i", begin)
        self._args = AdapterArgs(kind, addressof(kept[0]), kept[1].buffer_info()[0])
        self._keep: Any = kept
        self.address = addressof(self._args)


def panels_of(up: Tensor) -> Tensor:
    """[rank, columns] -> [columns / LANES, rank, LANES], of whole panels."""
    return up.view(len(up), -1, LANES).transpose(0, 1).contiguous()


def whole_ranks(matrix: Tensor, axis: int) -> Tensor:
    """Zeros behind the last rank, so that their number is one that the kernels take."""
    missing = -matrix.shape[axis] % RANKS
    if not missing:
        return matrix
    shape = list(matrix.shape)
    shape[axis] = missing
    return torch.cat((matrix, matrix.new_zeros(shape)), axis)


def step_adapters(runs: Sequence[Rows]) -> tuple[Any, int]:
    """(The address of each row's adapter, the most ranks) for StepArgs; null and 0 when no row has one. Keep the first
    as long as the step."""
    found = [_args(run.adapter) if run.adapter is not None else None for run in runs]
    ranks = max((own.ranks for own in found if own is not None), default=0)
    if not ranks:
        return None, 0
    addresses = [
        None if own is None else own.address for own, run in zip(found, runs, strict=True) for _ in range(run.tokens)
    ]
    return (c_void_p * len(addresses))(*addresses), ranks


def _args(adapter: AdapterWeights) -> StepAdapter:
    assert isinstance(adapter.args, StepAdapter), "loaded for torch"
    return adapter.args
