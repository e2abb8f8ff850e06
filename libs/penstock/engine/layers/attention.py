"""Attention over gathered keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_MOST_SCORES = 1 << 24
"""Scores that soft-capped attention holds at a time."""


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Scaled dot-product attention of some rows of some sequences.

    query [batch, rows, heads, dim], keys [batch, tokens, kv_heads, dim], values [batch, tokens, kv_heads, width] ->
    [batch * rows, heads * width]. `mask` [batch, 1, rows, tokens] is added to the scores: 0 where a row may attend,
    minus infinity elsewhere; None lets it look everywhere, or, with `causal`, row i at the tokens up to i. Scores are
    products times `scale`; with `softcap` a score s becomes softcap * tanh(s / softcap).
    """
    batch, rows, heads, dim = query.shape
    kv_heads = keys.shape[2]
    if softcap is not None:
        return _capped(query, keys, values, mask, causal=causal, scale=scale, softcap=softcap)
    width = values.shape[-1]
    if width < dim:  # torch's fused attention has one width for all, and any other one takes memory for all scores
        return (
            attend(query, keys, F.pad(values, (0, dim - width)), mask, causal=causal, scale=scale)
            .view(batch * rows, heads, dim)[..., :width]
            .flatten(1)
        )
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if rows == 1:  # heads that share keys become rows of one head: each key is read once
        grouped = query.view(batch, kv_heads, heads // kv_heads, dim)
        mixed = F.scaled_dot_product_attention(grouped, keys, values, mask, scale=scale)
        return mixed.reshape(batch, -1)
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2), keys, values, mask, is_causal=causal, enable_gqa=heads != kv_heads, scale=scale
    )
    return mixed.transpose(1, 2).reshape(batch * rows, -1)


def _capped(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, causal: bool, scale: float, softcap: float
) -> Tensor:
    """torch's fused attention has no cap, so the scores are laid out here, in float32 and a bounded number of rows
    at a time."""
    batch, rows, heads, dim = query.shape
    tokens, kv_heads = keys.shape[1:3]
    if causal:
        mask = keys.new_full((rows, tokens), float("-inf")).triu_(1)
    keys, values = keys.permute(0, 2, 3, 1), values.transpose(1, 2)
    step = max(1, _MOST_SCORES // (batch * heads * tokens))
    parts = []
    for first in range(0, rows, step):
        some = query[:, first : first + step]
        count = some.shape[1]
        grouped = some.transpose(1, 2).reshape(batch, kv_heads, -1, dim)  # each key is read once for all its heads
        scores = (grouped @ keys).float().view(batch, heads, count, tokens)
        scores = scores.mul_(scale / softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores += mask[..., first : first + step, :]
        weights = scores.softmax(-1).to(values.dtype).view(batch, kv_heads, -1, tokens)
        parts.append((weights @ values).view(batch, heads, count, dim).transpose(1, 2))
    return torch.cat(parts, dim=1).reshape(batch * rows, heads * dim)


def naive_attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Computes `attend` one row and one head at a time: the oracle of the fast paths.

    query [rows, heads, dim] of one sequence, keys and values [tokens, kv_heads, dim]; row i stands at
    `positions[i]` and looks at the tokens up to there, with `window` only at the last so many of them, its own
    included. -> [rows, heads * dim].
    """
    rows, heads, dim = query.shape
    mixed = torch.zeros(rows, heads, dim)
    for row, position in enumerate(positions):
        for head in range(heads):
            shared = head * keys.shape[1] // heads
            seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
            scores = keys[seen, shared] @ query[row, head] * scale
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            weights = (scores - scores.max()).exp()
            mixed[row, head] = (weights / weights.sum()) @ values[seen, shared]
    return mixed.reshape(rows, heads * dim)
