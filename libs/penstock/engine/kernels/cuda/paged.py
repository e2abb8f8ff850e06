"""Attention that reads keys and values on their pages: the interface of its backends, and their oracle.

A backend is chosen once, when the model is loaded (see `choose`). For each step it learns which rows of which sequences
look at which pages (`Paged`), and returns a function that the layers call (`Attend`).

The memory is page-major, so the keys of one layer are a strided view [pages, block, kv_heads, head_dim] whose pages lie
far apart (`keys_of`, `values_of`). Backends read that view as it is; none copies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.checkpoint import ModelConfig
from penstock.engine.layers.attention import attend
from penstock.engine.step.memory import PageMemory

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a model's attention."""

    heads: int
    kv_heads: int
    dim: int
    scale: float
    softcap: float | None
    windows: tuple[int | None, ...]
    """The window of each layer; None: it sees everything."""

    @classmethod
    def of(cls, config: ModelConfig) -> Heads:
        return cls(
            config.n_heads,
            config.n_kv_heads,
            config.head_dim,
            config.attention_scale,
            config.attention_softcap,
            tuple(config.windows),
        )


@dataclass(frozen=True, slots=True)
class HostPaged:
    """Some rows of B sequences, laid end to end, and the pages that they look at, in host memory."""

    starts: Int32s
    """[B + 1]: sequence b has the rows [starts[b], starts[b + 1]), at least one."""
    ends: Int32s
    """[B]: how many tokens a sequence's last row sees, its own included; each row before it sees one less."""
    tables: Int32s
    """[B, width]: a sequence's pages, in order; numbers behind those that hold its tokens mean nothing."""

    @property
    def most_rows(self) -> int:
        return int(np.diff(self.starts).max())


@dataclass(frozen=True, slots=True)
class Paged:
    """A HostPaged on the device, with the bounds that calls need in advance."""

    starts: Tensor
    ends: Tensor
    tables: Tensor
    rows: int
    most_rows: int
    """Most rows of one sequence."""
    most_tokens: int
    """Most tokens that one row may see. In a captured step these are as many as its sequences may grow to."""


class Attend(Protocol):
    """The attention of one step; its layers call it one after the other."""

    def __call__(self, layer: int, query: Tensor) -> Tensor:
        """Computes one layer: [rows, heads, head_dim] -> [rows, heads * head_dim]."""
        ...

    def again(self, host: HostPaged) -> None:
        """Prepares the replay of a captured step: only the content of the tensors has changed, to that of `host`."""
        ...


class PagedAttention(Protocol):
    """One way to compute paged attention. It keeps only its workspace between steps; one thread uses it at a time."""

    name: str
    most_rows: int | None
    """Most rows of one sequence; pages of longer runs are gathered. None: any number."""
    graph_rows: int
    """Most rows of one sequence in a captured step; 0: its steps can't be captured."""

    def begin(self, paged: Paged, host: HostPaged, fixed: bool) -> Attend:
        """Prepares the attention of one step. `fixed` says that the step will be captured: its tensors keep their
        places and shapes, and their content changes."""
        ...


def keys_of(memory: PageMemory, layer: int) -> Tensor:
    """The keys of one layer: a view, [pages, block, kv_heads, head_dim]."""
    return memory.data[:, layer - memory.first_layer, 0]


def values_of(memory: PageMemory, layer: int) -> Tensor:
    """The values of one layer: a view, [pages, block, kv_heads, head_dim]."""
    return memory.data[:, layer - memory.first_layer, 1]


def host_paged(
    ends: Sequence[int], rows: Sequence[int], tables: Sequence[Sequence[int] | Int32s], width: int
) -> HostPaged:
    """Makes a HostPaged from one entry per sequence; tables are filled up to `width` with page 0."""
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(rows, out=starts[1:])
    filled = np.zeros((len(rows), width), dtype=np.int32)
    for row, table in enumerate(tables):
        filled[row, : len(table)] = table
    return HostPaged(starts, np.asarray(ends, dtype=np.int32), filled)


def on_device(host: HostPaged, device: torch.device) -> Paged:
    """Copies `host` to the device, for a step that is not captured."""
    starts, ends, tables = (torch.from_numpy(each).to(device) for each in (host.starts, host.ends, host.tables))
    return Paged(starts, ends, tables, int(host.starts[-1]), host.most_rows, int(host.ends.max()))


class GatherPaged:
    """Copies every sequence's pages together and lets torch attend: the oracle of the other backends."""

    name = "gather"
    most_rows: int | None = None

    def __init__(self, heads: Heads, memory: PageMemory) -> None:
        self.graph_rows = 1 << 20
        self._heads = heads
        self._memory = memory

    def begin(self, paged: Paged, host: HostPaged, fixed: bool) -> Attend:
        return _Gathered(self._heads, self._memory, paged)


class _Gathered:
    def __init__(self, heads: Heads, memory: PageMemory, paged: Paged) -> None:
        self._heads = heads
        self._memory = memory
        self._paged = paged

    def __call__(self, layer: int, query: Tensor) -> Tensor:
        """Lays rows out as [B, most_rows]; a sequence with fewer rows repeats its last one."""
        heads, paged, size = self._heads, self._paged, self._memory.block_size
        starts, ends = paged.starts.long(), paged.ends.long()
        count = starts.diff()
        place = torch.arange(paged.most_rows, device=query.device)
        row = torch.minimum(place, count.unsqueeze(1) - 1)  # [B, most_rows]
        position = ends.unsqueeze(1) - count.unsqueeze(1) + row
        token = torch.arange(paged.tables.shape[1] * size, device=query.device)
        seen = token <= position.unsqueeze(2)
        window = heads.windows[layer]
        if window is not None:
            seen &= token > position.unsqueeze(2) - window
        mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, float("-inf"))
        tables = paged.tables.long().clamp(0, self._memory.data.shape[0] - 1)
        keys, values = (
            each[tables].flatten(1, 2) for each in (keys_of(self._memory, layer), values_of(self._memory, layer))
        )
        unseen = ~(token < ends.unsqueeze(1))[:, :, None, None]
        keys, values = keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0)
        own = query[starts[:-1].unsqueeze(1) + row]
        mixed = attend(
            own,
            keys.to(own.dtype),
            values.to(own.dtype),
            mask.unsqueeze(1),
            causal=False,
            scale=heads.scale,
            softcap=heads.softcap,
        )
        # A repeated row writes what the last one writes, so that shapes depend on the bounds alone.
        return mixed.new_empty(query.shape[0], mixed.shape[1]).index_copy_(
            0, (starts[:-1].unsqueeze(1) + row).flatten(), mixed
        )

    def again(self, host: HostPaged) -> None:
        pass
