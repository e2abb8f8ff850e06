"""Paged attention in Triton, for decode steps and short verification; contexts are split over the processors.

Every context is cut into chunks of CHUNK tokens, whatever the batch is. The chunks of a row are computed independently
(flash attention's online softmax; Dao et al., 2022) and merged in their order (Flash-Decoding; Dao et al., 2023). So a
row's result does not depend on the rows beside it. Query heads that share a KV head are rows of one product, and so are
the rows of all sequences that have the same pages in a whole chunk (see cascade.py): each key is read once for as many
of them as a product takes. What a row gets does not depend on where in a product it stands. float32 is computed in
float32, not in TF32.

Captured steps follow the pages too: the list of what there is to do lies in a tensor with room for the longest list
that there can be, and is filled anew before a replay.

Triton's interpreter checks these kernels on a CPU; they have not been measured on a GPU yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.engine.kernels.cuda.cascade import Outline, WorkList, outline, work_list
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
        return _Step(self._heads, self._memory, paged, host, fixed)


class _Step:
    """The tile shapes, the work and the workspace of one step."""

    def __init__(self, heads: Heads, memory: PageMemory, paged: Paged, host: HostPaged, fixed: bool) -> None:
        self._heads = heads
        self._memory = memory
        self._paged = paged
        self._shape = _shape(heads, memory)
        self._merge = {name: self._shape[name] for name in ("HEADS", "DIM", "WIDE", "CHUNK")}
        self._chunks = -(-paged.most_tokens // CHUNK)
        split = self._chunks > 1
        self._fits = _WORKSPACE // (self._chunks * heads.heads * heads.dim) if split else paged.rows
        self._outline = self._outlined(host)
        listed = work_list(self._outline, _rows_together(self._shape), self._fits)
        most = max(part.rows for part in listed.launches)
        device = memory.data.device
        self._parts = torch.empty(self._chunks * most * heads.heads * heads.dim, device=device) if split else None
        self._lse = torch.empty(self._chunks * most * heads.heads, device=device) if split else None
        self._work = _Work(listed, self._most_items(host, listed) if fixed else None, device)

    def _outlined(self, host: HostPaged) -> Outline:
        return outline(host, self._memory.block_size, CHUNK)

    def _most_items(self, host: HostPaged, listed: WorkList) -> list[int]:
        """As many items as each launch of a captured step may ever have: those of sequences that share nothing. All
        have the same number of rows."""
        tiles = -(-host.most_rows // _rows_together(self._shape))
        return [part.rows // host.most_rows * tiles * self._chunks for part in listed.launches]

    def __call__(self, layer: int, query: Tensor) -> Tensor:
        """Computes one layer: [rows, heads, head_dim] -> [rows, heads * head_dim]."""
        heads, paged, memory, work = self._heads, self._paged, self._memory, self._work
        query = query.contiguous()
        out = torch.empty_like(query)
        window = heads.windows[layer]
        split = self._chunks > 1
        for first, rows, items in work.launches:
            partial[(len(items) // 3, heads.kv_heads)](
                query,
                keys_of(memory, layer),
                values_of(memory, layer),
                paged.tables,
                paged.starts,
                paged.ends,
                work.rows,
                work.owners,
                items,
                self._parts if split else out,
                self._lse if split else out,
                first,
                rows,
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
                merge[(rows, heads.heads)](
                    self._parts,
                    self._lse,
                    paged.starts,
                    paged.ends,
                    work.rows,
                    work.owners,
                    out,
                    first,
                    rows,
                    **self._merge,
                    num_warps=1,
                )
        return out.flatten(1)

    def again(self, host: HostPaged) -> None:
        """Lists the work of other sequences or longer ones, if it is not the same."""
        now = self._outlined(host)
        if now != self._outline:
            self._outline = now
            self._work.bring(work_list(now, _rows_together(self._shape), self._fits))


class _Work:
    """A work list on the device, in one tensor, to which one copy brings it."""

    def __init__(self, listed: WorkList, most_items: list[int] | None, device: torch.device) -> None:
        """`most_items`: the room of each launch, if other lists are to be brought; None: as much as this one takes."""
        rows, room = len(listed.rows), most_items or [len(part.items) for part in listed.launches]
        sizes = [rows, rows, *(3 * items for items in room)]
        padded = [-(-size // 4) * 4 for size in sizes]  # kernels are compiled for places that are multiples of 16 bytes
        pinned = most_items is not None and device.type == "cuda"
        self._host = torch.zeros(sum(padded), dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros(sum(padded), dtype=torch.int32, device=device)
        self._parts, (self.rows, self.owners, *items) = (
            [part[:size] for part, size in zip(torch.split(whole, padded), sizes, strict=True)]
            for whole in (self._host, self._device)
        )
        self.launches = [(part.first, part.rows, some) for part, some in zip(listed.launches, items, strict=True)]
        """(first row, rows, items) of each launch."""
        self.bring(listed)

    def bring(self, listed: WorkList) -> None:
        """Copies a list to the device; it has rows and launches as the first had. The host's copy is free: whoever read
        the last step's results has waited for that step."""
        content = [listed.rows, listed.owners, *(part.items.ravel() for part in listed.launches)]
        for part, new in zip(self._parts, content, strict=True):
            part[: len(new)] = torch.from_numpy(new)
            part[len(new) :] = 0
        self._device.copy_(self._host, non_blocking=True)


def _rows_together(shape: dict[str, Any]) -> int:
    """How many rows one product takes."""
    return int(shape["M"] // shape["GROUP"])


def _shape(heads: Heads, memory: PageMemory) -> dict[str, Any]:
    """The kernel's constants. They depend on the model and the page memory and never on the step, so that a row's sums
    are always added in the same order.

    A product takes at least 16 query heads. In 16 bits it takes those of four rows where the registers are enough: that
    costs no traffic, and tensor cores have time for it while keys arrive. float32 uses none, and would spill.
    """
    group, size = heads.heads // heads.kv_heads, memory.data.element_size()
    wide = max(16, _power(heads.dim))
    most = 16 if size > 2 else 64 if wide <= 128 else 32
    return {
        "HEADS": heads.heads,
        "GROUP": group,
        "DIM": heads.dim,
        "WIDE": wide,
        "BLOCK": memory.block_size,
        "M": max(16, _power(group), min(most, _power(4 * group))),
        "TILE": 16 if size > 2 else 64 if wide <= 64 else 32,
        "CHUNK": CHUNK,
        "CAPPED": heads.softcap is not None,
        "PRECISION": "ieee",
    }


def _power(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
