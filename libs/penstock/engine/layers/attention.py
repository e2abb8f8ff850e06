"""Attention over gathered keys and values."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Scaled dot-product attention of some rows of some sequences.

    query [batch, rows, heads, dim], keys and values [batch, tokens, kv_heads, dim] -> [batch * rows, heads * dim].
    `mask` is bool [batch, 1, rows, tokens], true where a row may look; None lets it look everywhere, or, with
    `causal`, row i at the tokens up to i.
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
