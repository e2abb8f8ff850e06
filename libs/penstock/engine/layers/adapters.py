"""What adapters add to a decoder's products: y = W x + B (A x) for the rows of each (LoRA, Hu et al., 2021).

The matrices of the base model stay as they are, however they are kept; the rows of several adapters, and rows of none,
are multiplied with them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from penstock.engine.layers.feedforward import Dense, Routed
from penstock.engine.layers.linear import Matrix, columns, linear
from penstock.engine.layers.weights import LatentWeights, LayerWeights


@dataclass(frozen=True, slots=True, eq=False)
class ThinProduct:
    """A product of two thin matrices, added to some columns of a matrix."""

    first: int
    columns: int
    down: Tensor
    """[rank, inputs]."""
    up: Tensor
    """[panels, rank, columns / panels], multiplied with the adapter's scale."""

    @property
    def nbytes(self) -> int:
        """In memory."""
        return self.down.nbytes + self.up.nbytes

    def of(self, x: Tensor, first: int, last: int) -> Tensor:
        """[N, inputs] -> [N, last - first]: what is added to these of its columns."""
        up = self.up.transpose(0, 1).flatten(1)[:, first:last]
        return torch.mm(torch.mm(x, self.down.t().to(x.dtype)), up.to(x.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """An adapter in memory. `layers` has what is added to each layer's matrices, by the names that these have
    there."""

    fingerprint: str
    layers: tuple[dict[str, tuple[ThinProduct, ...]], ...]
    nbytes: int
    args: Any = field(default=None, repr=False)
    """For the kernels of a CPU, see kernels/cpu/adapting.py; None where these do not compute the model, or it."""
    by_torch: bool = False
    """Whether torch alone computes it, see AdapterCheckpoint."""


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The rows of a step that have one adapter: their numbers among all, and among the sampled ones."""

    adapter: AdapterWeights
    rows: Tensor
    sampled: Tensor


class AdaptedMatrix:
    """A matrix and its bias, and what adapters add for their rows. It multiplies all rows of a step, or the sampled
    ones."""

    def __init__(
        self, matrix: Matrix, bias: Tensor | None, thin: Sequence[tuple[ThinProduct, AdaptedRows]], *, all_rows: int
    ) -> None:
        """`all_rows` is how many the step has."""
        self._matrix, self._bias = matrix, bias
        self._added, self._all_rows = thin, all_rows
        self._first = 0
        self.shape = (matrix.shape[0], matrix.shape[1])

    def columns(self, first: int, last: int) -> AdaptedMatrix:
        """A view of the columns [first, last)."""
        bias = None if self._bias is None else self._bias[first:last]
        part = AdaptedMatrix(columns(self._matrix, first, last), bias, self._added, all_rows=self._all_rows)
        part._first = self._first + first
        return part

    def product(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        y = linear(x, self._matrix, self._bias)
        last = self._first + self.shape[1]
        for part, own in self._added:
            begin, end = max(self._first, part.first), min(last, part.first + part.columns)
            rows = own.rows if len(x) == self._all_rows else own.sampled
            if begin < end and len(rows):
                added = part.of(x.index_select(0, rows), begin - part.first, end - part.first)
                y[:, begin - self._first : end - self._first].index_add_(0, rows, added)
        return y


class AdaptedExperts:
    """What adapters add to the router and the experts of a layer, for the rows of each."""

    def __init__(self, layer: int, adapters: Sequence[AdaptedRows], *, all_rows: int) -> None:
        """`layer` is its number among those that adapters have; `all_rows` is how many rows the step has."""
        self._layer, self._adapters, self._all_rows = layer, adapters, all_rows

    def add(self, name: str, x: Tensor, y: Tensor, total: int, rows: Tensor | None = None) -> None:
        """See AddsToExperts."""
        for own in self._adapters:
            if not (parts := own.adapter.layers[self._layer].get(name, ())):
                continue
            places = own.rows if total == self._all_rows else own.sampled
            if rows is not None:
                places = torch.isin(rows, places).nonzero().flatten()
            given = x.index_select(0, places)
            for part in parts if len(places) else ():
                there = y[:, part.first : part.first + part.columns]
                there.index_add_(0, places, part.of(given, 0, part.columns))


def adapted(layers: Sequence[LayerWeights], adapters: Sequence[AdaptedRows], all_rows: int) -> list[LayerWeights]:
    """The layers for one step of `all_rows` rows, with what its adapters add."""
    return [_layer(layer, number, adapters, all_rows) for number, layer in enumerate(layers)]


def _layer(layer: LayerWeights, number: int, adapters: Sequence[AdaptedRows], all_rows: int) -> LayerWeights:
    def matrix(name: str, base: Matrix, bias: Tensor | None) -> Matrix:
        thin = [(part, own) for own in adapters for part in own.adapter.layers[number].get(name, ())]
        return AdaptedMatrix(base, bias, thin, all_rows=all_rows) if thin else base

    def experts(block: Routed) -> Routed:
        own = [one for one in adapters if one.adapter.by_torch]
        added = AdaptedExperts(number, own, all_rows=all_rows) if own else None
        return replace(block, adapted=added, shared=None if block.shared is None else dense(block.shared))

    def dense(block: Dense) -> Dense:
        return replace(
            block,
            gate_up=matrix("gate_up", block.gate_up, block.gate_up_bias),
            down=matrix("down", block.down, block.down_bias),
        )

    mlp: Dense | Routed = layer.mlp
    mlp = dense(mlp) if isinstance(mlp, Dense) else experts(mlp)
    latent: LatentWeights | None = layer.latent
    if latent is not None and latent.query is not None:
        latent = replace(latent, query=matrix("query", latent.query, None))
    return replace(
        layer,
        qkv=matrix("qkv", layer.qkv, layer.qkv_bias),
        out=matrix("out", layer.out, layer.out_bias),
        mlp=mlp,
        latent=latent,
    )
