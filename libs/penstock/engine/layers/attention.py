"""Attention over gathered keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Scaled dot-product attention of some rows of some sequences.

    query [batch, rows, heads, dim], keys and values [batch, tokens, kv_heads, dim] -> [batch * rows, heads * dim].
    `mask` [batch, 1, rows, tokens] is added to the scores: 0 where a row may look, minus infinity elsewhere; None
    lets it look everywhere, or, with `causal`, row i at the tokens up to i.
    """
    batch, rows, heads, dim = query.shape
    kv_heads = keys.shape[2]
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if rows == 1:  # heads that share keys become rows of one head: each key is read once
        grouped = query.view(batch, kv_heads, heads // kv_heads, dim)
        mixed = F.scaled_dot_product_attention(grouped, keys, values, mask)
        return mixed.reshape(batch, heads * dim)
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2), keys, values, mask, is_causal=causal, enable_gqa=heads != kv_heads
    )
    return mixed.transpose(1, 2).reshape(batch * rows, heads * dim)


def naive_attend(query: Tensor, keys: Tensor, values: Tensor, positions: Sequence[int]) -> Tensor:
    """What `attend` means, one row and one head at a time: the oracle of the fast paths.

    query [rows, heads, dim] of one sequence, keys and values [tokens, kv_heads, dim]; row i stands at
    `positions[i]` and looks at the tokens up to there. -> [rows, heads * dim].
    """
    rows, heads, dim = query.shape
    mixed = torch.zeros(rows, heads, dim)
    for row, position in enumerate(positions):
        for head in range(heads):
            shared = head * keys.shape[1] // heads
            seen = slice(0, position + 1)
            scores = keys[seen, shared] @ query[row, head] / math.sqrt(dim)
            weights = (scores - scores.max()).exp()
            mixed[row, head] = (weights / weights.sum()) @ values[seen, shared]
    return mixed.reshape(rows, heads * dim)
