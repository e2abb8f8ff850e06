"""From tokens to vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Embedding:
    """`table` [vocab, hidden] may be the checkpoint's own bytes, mapped: rows become `dtype` when they are asked for.

    They are multiplied by `scale`, where the family does that.
    """

    def __init__(self, table: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
        self._table = table
        self._dtype = dtype
        self._scale = None if scale == 1.0 else torch.tensor(scale, dtype=dtype, device=table.device)
        self.device = table.device

    def rows(self, ids: Tensor) -> Tensor:
        """[N] -> [N, hidden], memory of their own."""
        found = F.embedding(ids, self._table).to(self._dtype)
        return found if self._scale is None else found.mul_(self._scale)
