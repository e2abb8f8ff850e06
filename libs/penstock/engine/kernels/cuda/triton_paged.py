"""Paged attention in Triton, for decode steps and short verification; contexts are split over the processors.

Every context is cut into chunks of CHUNK tokens, whatever the batch is. The chunks of a row are computed independently
(flash attention's online softmax; Dao et al., 2022) and merged in their order (Flash-Decoding; Dao et al., 2023). So a
row's result does not depend on the rows beside it. Query heads that share a KV head are rows of one product, so that
each key is read once for all of them. float32 is computed in float32, not in TF32.

Triton's interpreter checks these kernels on a CPU; they have not been measured on a GPU yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.engine.kernels.cuda.paged import Attend, Heads, HostPaged, Paged, keys_of, values_of
from penstock.engine.kernels.cuda.triton_kernels import merge, partial
from penstock.engine.step.memory import PageMemory

CHUNK = 256
MOST_ROWS = 16
"""Runs of more rows go to torch's attention over gathered pages, which is built for tall products."""
_WORKSPACE = 64 << 20
"""Most floats of partial results that exist at a time."""


class TritonPaged:
    """PagedAttention by the kernels of triton_kernels.py."""

    name = "triton"
    most_rows: int | None = MOST_ROWS
    graph_rows = MOST_ROWS

    def __init__(self, heads: Heads, memory: PageMemory) -> None:
        self._heads = heads
        self._memory = memory

    def begin(self, paged: Paged, host: HostPaged, fixed: bool) -> Attend:
        """Prepares the attention of one step; `fixed` says that the step will be captured."""
        return _Step(self._heads, self._memory, paged, host)


class _Step:
    """The tile shapes and the workspace of one step."""

    def __init__(self, heads: Heads, memory: PageMemory, paged: Paged, host: HostPaged) -> None:
        self._heads = heads
        self._memory = memory
        self._paged = paged
        self._shape = _shape(heads, memory)
        self._merge = {name: self._shape[name] for name in ("HEADS", "DIM", "WIDE", "CHUNK")}
        self._chunks = -(-paged.most_tokens // CHUNK)
        self._slices = self._cut(host) if self._chunks > 1 else [(0, len(host.ends), 0, paged.rows)]
        most = max(rows for _, _, _, rows in self._slices)
        device = memory.data.device
        self._parts = (
            torch.empty(self._chunks * most * heads.heads * heads.dim, device=device) if self._chunks > 1 else None
        )
        self._lse = torch.empty(self._chunks * most * heads.heads, device=device) if self._chunks > 1 else None

    def _cut(self, host: HostPaged) -> list[tuple[int, int, int, int]]:
        """Cuts the batch into parts whose results fit the workspace: (first sequence, end, first row, rows) of each."""
        fits = max(1, _WORKSPACE // (self._chunks * self._heads.heads * self._heads.dim))
        slices, first = [], 0
        starts = host.starts.tolist()
        for sequence in range(1, len(starts)):
            if sequence == len(starts) - 1 or starts[sequence + 1] - starts[first] > fits:
                slices.append((first, sequence, starts[first], starts[sequence] - starts[first]))
                first = sequence
        return slices

    def __call__(self, layer: int, query: Tensor) -> Tensor:
        """Computes one layer: [rows, heads, head_dim] -> [rows, heads * head_dim]."""
        heads, paged, memory = self._heads, self._paged, self._memory
        query = query.contiguous()
        out = torch.empty_like(query)
        window = heads.windows[layer]
        split = self._chunks > 1
        tiles = -(-paged.most_rows // int(self._shape["ROWS"]))
        for first, end, first_row, rows in self._slices:
            partial[((end - first) * tiles, heads.kv_heads, self._chunks)](
                query,
                keys_of(memory, layer),
                values_of(memory, layer),
                paged.tables,
                paged.starts,
                paged.ends,
                self._parts if split else out,
                self._lse if split else out,
                first,
                first_row,
                rows,
                tiles,
                paged.tables.stride(0),
                memory.data.stride(0),
                heads.scale,
                heads.softcap or 1.0,
                window or 0,
                WINDOWED=window is not None,
                SPLIT=split,
                **self._shape,
                num_warps=4,
                num_stages=2,
            )
            if split:
                merge[((end - first) * paged.most_rows, heads.heads)](
                    self._parts,
                    self._lse,
                    paged.starts,
                    paged.ends,
                    out,
                    first,
                    first_row,
                    rows,
                    paged.most_rows,
                    **self._merge,
                    num_warps=1,
                )
        return out.flatten(1)

    def again(self, host: HostPaged) -> None:
        """Does nothing: the kernels read the changed tensors."""


def _shape(heads: Heads, memory: PageMemory) -> dict[str, Any]:
    """The kernel's constants. They depend on the model and the page memory and never on the step, so that a row's sums
    are always added in the same order."""
    group, size = heads.heads // heads.kv_heads, memory.data.element_size()
    wide, m = max(16, _power(heads.dim)), max(16, _power(group))
    return {
        "HEADS": heads.heads,
        "GROUP": group,
        "DIM": heads.dim,
        "WIDE": wide,
        "BLOCK": memory.block_size,
        "ROWS": m // _power(group),
        "M": m,
        "TILE": 16 if size > 2 else 64 if wide <= 128 else 32,
        "CHUNK": CHUNK,
        "CAPPED": heads.softcap is not None,
        "PRECISION": "ieee",
    }


def _power(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
