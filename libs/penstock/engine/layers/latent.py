"""Multi-head latent attention (DeepSeek-V2, 2024) in its two forms, which give the same result.

A token's keys and values of all heads are linear in one vector c: a head's key is K c, its value V c, beside a rotated
key that all heads have in common. A score q . (K c) is (K' q) . c, with K' the transpose of K: *absorbed* into the
query, K is applied once for a row instead of once for each token that the row looks at, and all heads look at the same
vectors. So it is also with V and what the scores mix. *Expanded*, keys and values are made of each token's vector, and
heads are narrow; that is less work where many rows look at the same tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.checkpoint import Latent
from penstock.engine.layers.weights import LatentWeights, SideBySide

LATENT_EPS = 1e-6
"""Of the norms of common vectors, whatever config.json says."""


def expands(rows: int, latent: Latent, turned: int) -> bool:
    """Whether it is less to compute keys and values of each token for so many rows of one text; `turned` dimensions of
    a head's key are rotated."""
    wide = latent.rank + turned + latent.rank
    narrow = latent.plain_dim + turned + latent.value_dim
    return rows * (wide - narrow) > latent.rank * (latent.plain_dim + latent.value_dim)


def absorb(query: Tensor, weights: LatentWeights, plain_dim: int) -> Tensor:
    """[batch, rows, heads, plain_dim + turned] -> [batch, rows, heads, rank + turned]."""
    batch, rows, heads, _ = query.shape
    plain = query[..., :plain_dim].reshape(batch * rows, heads, plain_dim).transpose(0, 1)
    found = torch.bmm(plain, _of_heads(weights.keys, heads)).transpose(0, 1).view(batch, rows, heads, -1)
    return torch.cat((found, query[..., plain_dim:]), -1)


def release(mixed: Tensor, weights: LatentWeights) -> Tensor:
    """What scores have mixed of common vectors, [N, heads, rank], as what they would mix of values:
    [N, heads * value_dim]."""
    return torch.bmm(mixed.transpose(0, 1), _of_heads(weights.values, weights.heads)).transpose(0, 1).flatten(1)


def expand(plane: Tensor, weights: LatentWeights, rank: int) -> tuple[Tensor, Tensor]:
    """[batch, tokens, 1, rank + turned] -> keys [batch, tokens, heads, plain_dim + turned] and values
    [batch, tokens, heads, value_dim]."""
    batch, tokens, _, _ = plane.shape
    heads = weights.heads
    common = plane[..., :rank].reshape(1, batch * tokens, rank)
    turned = _of_heads(weights.keys, heads).transpose(1, 2)
    plain = torch.matmul(common, turned).transpose(0, 1).view(batch, tokens, heads, -1)
    values = torch.matmul(common, _of_heads(weights.values, heads)).transpose(0, 1).view(batch, tokens, heads, -1)
    return torch.cat((plain, plane[..., rank:].expand(-1, -1, heads, -1)), -1), values


def _of_heads(matrices: Tensor | SideBySide, heads: int) -> Tensor:
    """[heads, in, out]."""
    if isinstance(matrices, Tensor):
        return matrices
    dense = matrices.dense()
    return dense.view(len(dense), heads, -1).transpose(0, 1)
