"""A decoder's weights in memory, the way its layers multiply by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock.engine.layers.embedding import Embedding
from penstock.engine.layers.feedforward import Dense, Routed
from penstock.engine.layers.linear import Matrix


class SideBySide(Protocol):
    """The matrices of all heads, [in, heads * out], in a form of their own."""

    def dense(self) -> Tensor:
        """All of it, in the type of activations and new memory."""
        ...


@dataclass(slots=True)
class LatentWeights:
    """See Latent."""

    norm: Tensor
    """[rank], of the common vector."""
    heads: int
    keys: Tensor | SideBySide
    """A matrix [plain_dim, rank] for each head: [heads, plain_dim, rank], or side by side."""
    values: Tensor | SideBySide
    """A matrix [rank, value_dim] for each head: [heads, rank, value_dim], or side by side."""
    query_norm: Tensor | None
    """[query_rank]; None: queries are made from the hidden state."""
    query: Matrix | None
    """[query_rank, heads * head_dim]."""


@dataclass(slots=True)
class LayerWeights:
    """Matrices are [in, out] and contiguous, which for a few rows is twice as fast on a CPU as [out, in].
    Projections with a common input are side by side: query, key, value; gate, up. Norms hold their
    factors: the weight, or 1 + weight in float32, depending on the family. Packed matrices contain their biases."""

    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]: the norm's weight of each head, queries first."""
    latent: LatentWeights | None
    """Of attention whose keys and values are made from a common vector: `qkv` is then what makes that vector and the
    rotated key, behind the queries, or behind the vector from which these are made."""
    out: Matrix
    out_bias: Tensor | None
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    mlp: Dense | Routed
    mlp_post_norm: Tensor | None


@dataclass(slots=True)
class Weights:
    embedding: Embedding
    layers: list[LayerWeights]
    norm: Tensor
    head: Matrix | None
    """[hidden, vocab], not scaled when it is the embedding; None where other processes have the last layers."""
    first: int = 0
    """Number of the first of the layers in the model."""
    expert_rows: npt.NDArray[np.int64] | None = None
    """[layers, experts]: the `rows` of each layer, see Routed, none where it has no experts; None: there are none, or
    they are not counted."""

    def count_in(self, room: npt.NDArray[np.int64]) -> None:
        """From now on rows are counted in `room`, [layers, experts], but for those of grouped products."""
        self.expert_rows = room
        for layer, own in zip(self.layers, room, strict=True):
            if isinstance(layer.mlp, Routed) and not layer.mlp.grouped:
                layer.mlp.rows = own
