"""The part of the pages that one rank computes.

Pages hold the KV of all heads, as an engine in one process has them, and lie in memory that all ranks of the host map:
so blocks are the same however a model is split, and rank 0 reads and writes them as ever. Of each token's row a rank
writes and gathers its own heads. Where several ranks have the same head, or keep the same vector of latent attention,
they write the same numbers to the same place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.step.int8_kv import SCALE_BYTES, from_rows, to_rows
from penstock.engine.step.memory import PageMemory


class PageWindow:
    """Some KV heads of a page memory, as a KvMemory."""

    def __init__(self, memory: PageMemory, heads: range) -> None:
        self.planes = memory.planes
        self.block_size = memory.block_size
        self.n_layers, self.first_layer = memory.n_layers, memory.first_layer
        self.first_head = heads.start
        self._all, self._width = memory.heads
        self._heads = len(heads)
        numbers = slice(heads.start * self._width, heads.stop * self._width)
        scales = slice(0, 0)
        if memory.scaled:
            behind = self._all * self._width
            scales = slice(behind + heads.start * SCALE_BYTES, behind + heads.stop * SCALE_BYTES)
        self._scaled = memory.scaled
        self._parts = [numbers, scales] if memory.scaled else [numbers]
        self._rows = [memory.vectors[:, part] for part in self._parts]
        strips = memory.vectors.view(-1, self.block_size, memory.vectors.shape[1])
        self._strips = [strips[:, :, part] for part in self._parts]

    def store(self, places: Tensor, vectors: Tensor) -> None:
        """As PageMemory.store, of the rank's heads: [N, heads * width]."""
        if not self._scaled:
            self._rows[0].index_copy_(0, places, vectors.to(self._rows[0].dtype))
            return
        cut = self._heads * self._width
        kept = to_rows(vectors.view(-1, self._heads, self._width))
        self._rows[0].index_copy_(0, places, kept[:, :cut])
        self._rows[1].index_copy_(0, places, kept[:, cut:])

    def gather(self, index: Tensor, batch: int, tokens: int) -> tuple[Tensor, ...]:
        """As PageMemory.gather, of the rank's heads."""
        found = [strips.index_select(0, index) for strips in self._strips]
        numbers = found[0]
        if self._scaled:
            rows = torch.cat(found, -1).view(-1, self._heads * (self._width + SCALE_BYTES))
            numbers = from_rows(rows, self._heads)
        each = numbers.view(self.planes, batch, -1, self._heads, self._width)
        return tuple(plane[:, :tokens] for plane in each)
