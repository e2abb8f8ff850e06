"""Problems of paged attention, and what is right."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from penstock.engine.kernels.cuda.paged import Heads, HostPaged, Paged, PagedAttention, host_paged, on_device
from penstock.engine.layers.attention import naive_attend

NOWHERE = torch.device("cpu")


@dataclass
class Problem:
    """Sequences of `ends` tokens with `rows` query rows each, on pages out of order."""

    rows: list[int]
    ends: list[int]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block: int = 16
    windows: tuple[int | None, ...] = (None, 7)
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0
    shares: tuple[tuple[int, int, int], ...] = ()
    """(sequence, one before it, how many first pages it has from that one), of as many as both have before their
    rows."""
    device: torch.device = NOWHERE
    rest: float = math.nan
    """What lies beyond the tokens. Libraries that multiply it by a weight of 0 need a number; pages have one there."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        used = sum(-(-end // self.block) for end in self.ends)
        shape = (used + 4, len(self.windows), 2, self.block, self.kv_heads, self.dim)
        data = torch.full(shape, self.rest)
        data[0] = 0
        pages = (torch.randperm(used + 3, generator=generator) + 1).tolist()
        self.tables: list[list[int]] = []
        for end in self.ends:
            own, pages = pages[: -(-end // self.block)], pages[-(-end // self.block) :]
            self.tables.append(own)
            content = data[own].transpose(1, 3).flatten(0, 1)  # [tokens, 2, layers, kv_heads, dim]
            content[:end] = torch.randn(content[:end].shape, generator=generator)
            data[own] = content.unflatten(0, (len(own), self.block)).transpose(1, 3)
        for sequence, like, count in self.shares:
            full = min((self.ends[each] - self.rows[each]) // self.block for each in (sequence, like))
            self.tables[sequence][: min(count, full)] = self.tables[like][: min(count, full)]
        placed = data.to(self.device, self.dtype)
        self.memory: Any = SimpleNamespace(data=placed, block_size=self.block, first_layer=0)
        query = torch.randn(sum(self.rows), self.heads, self.dim, generator=generator)
        self.query = query.to(self.device, self.dtype)
        self.shape = Heads(self.heads, self.kv_heads, self.dim, self.dim**-0.5, self.softcap, self.windows)
        self.host: HostPaged = host_paged(self.ends, self.rows, self.tables, max(map(len, self.tables)) + 1)
        self.paged: Paged = on_device(self.host, self.device)

    def right(self, layer: int) -> Tensor:
        """By the naive oracle, in float32."""
        answers, first = [], 0
        for rows, end, table in zip(self.rows, self.ends, self.tables, strict=True):
            content = self.memory.data[table, layer].cpu().float().transpose(1, 2).flatten(0, 1)[:end]
            positions = range(end - rows, end)
            keys, values = content[:, 0], content[:, 1]
            own = self.query[first : first + rows].cpu().float()
            scale, window = self.shape.scale, self.windows[layer]
            answers.append(naive_attend(own, keys, values, positions, scale=scale, window=window, softcap=self.softcap))
            first += rows
        return torch.cat(answers)

    def worst(self, backend: PagedAttention, fixed: bool = False) -> float:
        """The largest difference from what is right, over all layers."""
        attend = backend.begin(self.paged, self.host, fixed)
        answers = [attend(layer, self.query) for layer in range(len(self.windows))]
        assert all(answer.dtype == self.dtype for answer in answers)
        return max(float((a.cpu().float() - self.right(at)).abs().max()) for at, a in enumerate(answers))
