"""Paged attention through flashinfer (Ye et al., 2025), when it is installed.

Its wrappers plan a step on the host and then run it layer by layer. Captured steps use decode wrappers with buffers of
their own, which are planned again before each replay. All other steps use prefill wrappers, which take any number of
rows. A layer's keys and values are given as a pair of strided views of the page memory in the layout NHD; the kernels
read the strides. Windows and soft caps are part of a plan, so there is one wrapper for each width of window.

Where sequences of such a step share a long prefix, layers without a window compute their rows in a cascade of two
levels (Ye et al., 2024): pages that a group has in common are read once for all of its rows, and each sequence's own
pages by themselves. Windows would be measured within a level, so layers with one go without. So do captured steps: the
number of groups would be captured with them.

With a cascade or without, a plan cuts contexts by what is in the batch, so the bits of a row depend on that. It
computes in 16 bits only, for which no more is promised (see docs/design/same-tokens.md).

This is written against the documented interface of flashinfer 0.7; it has not run on a GPU yet.
"""

from __future__ import annotations

import importlib.util
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.kernels.cuda.cascade import Sharers, page_order, sharers
from penstock.engine.kernels.cuda.paged import Attend, Heads, HostPaged, Int32s, Paged, host_paged, keys_of, values_of
from penstock.engine.step.memory import PageMemory

_WORKSPACE = 128 << 20
"""Bytes that flashinfer asks for; they begin as zeros."""
LEAST_SHARED = 512
"""Tokens that sequences have in common at least to be computed in a cascade, which costs two calls and joins their
results."""
_DIMS = (64, 128, 256)


def missing(heads: Heads, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Why flashinfer can't be used with this device or model; None when it can be tried."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not in {dtype}"
    if heads.dim not in _DIMS:
        return f"its kernels are for heads of {', '.join(map(str, _DIMS))}, not of {heads.dim}"
    if capability < (7, 5):
        return f"it needs compute capability 7.5, this device has {capability[0]}.{capability[1]}"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    return None


def flat(host: HostPaged, block_size: int) -> tuple[Int32s, Int32s, Int32s]:
    """Block tables in flashinfer's form: (indptr [B + 1], pages, tokens on the last page [B])."""
    counts = -(-host.ends // block_size)
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    inside = np.arange(host.tables.shape[1]) < counts[:, None]
    return indptr, host.tables[inside], (host.ends - (counts - 1) * block_size).astype(np.int32)


def levels(host: HostPaged, groups: list[Sharers], block_size: int) -> tuple[HostPaged, HostPaged]:
    """The two levels of a cascade, over the sequences of all groups in their order: what each group has in common, as
    one sequence, and what each of its sequences has of its own, which holds all tokens of its rows."""
    counts = np.diff(host.starts)
    common = host_paged(
        [group.pages * block_size for group in groups],
        [int(counts[group.sequences].sum()) for group in groups],
        [host.tables[group.sequences[0], : group.pages] for group in groups],
        max(group.pages for group in groups),
    )
    members = [(sequence, group.pages) for group in groups for sequence in group.sequences]
    own = host_paged(
        [int(host.ends[sequence]) - pages * block_size for sequence, pages in members],
        [int(counts[sequence]) for sequence, _ in members],
        [host.tables[sequence, pages:] for sequence, pages in members],
        host.tables.shape[1],
    )
    return common, own


class _Wrappers:
    """The wrappers of a step that is not captured, made when they are first needed."""

    def __init__(self, flashinfer: Any, workspace: Tensor) -> None:
        self._module = flashinfer
        self._space = workspace
        self._prefill: dict[int | None, Any] = {}

    def prefill(self, window: int | None) -> Any:
        """The one for any number of rows."""
        if window not in self._prefill:
            self._prefill[window] = self._module.BatchPrefillWithPagedKVCacheWrapper(self._space, "NHD")
        return self._prefill[window]

    @cached_property
    def cascade(self) -> Any:
        """The one for rows that share pages."""
        return self._module.MultiLevelCascadeAttentionWrapper(2, self._space, "NHD")


class FlashInferPaged:
    """PagedAttention by flashinfer's wrappers.

    All share a workspace, because calls run one after the other. The attention of a step's last layer may begin before
    that of the other layers is called, so two sets of wrappers take turns in steps that are not captured.
    """

    name = "flashinfer"
    most_rows: int | None = None
    graph_rows = 1

    def __init__(self, heads: Heads, memory: PageMemory, flashinfer: Any) -> None:
        self.heads = heads
        self.memory = memory
        self._module = flashinfer
        self._space = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=memory.data.device)
        self._next, self._last = (_Wrappers(flashinfer, self._space) for _ in range(2))

    def begin(self, paged: Paged, host: HostPaged, fixed: bool) -> Attend:
        """Prepares the attention of one step; `fixed` says that the step will be captured."""
        if not fixed:
            self._next, self._last = self._last, self._next
            return _Eager(self, self._last, host)
        step = _Captured(self, {window: self._decoder(paged) for window in dict.fromkeys(self.heads.windows)})
        step.again(host)
        return step

    def _decoder(self, paged: Paged) -> Any:
        """A wrapper for a fixed number of sequences, with room for all pages that they may ever have."""
        sequences, device = paged.ends.shape[0], self.memory.data.device

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        return self._module.BatchDecodeWithPagedKVCacheWrapper(
            self._space,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=ints(sequences + 1),
            paged_kv_indices_buffer=ints(sequences * paged.tables.shape[1]),
            paged_kv_last_page_len_buffer=ints(sequences),
        )

    def tables(self, host: HostPaged) -> list[Tensor]:
        """`flat` as tensors."""
        return [torch.from_numpy(each) for each in flat(host, self.memory.block_size)]

    def sizes(self) -> tuple[int, int, int, int]:
        """The arguments of every plan behind its tables."""
        return self.heads.heads, self.heads.kv_heads, self.heads.dim, self.memory.block_size

    def options(self, window: int | None) -> dict[str, Any]:
        """The arguments by name of every plan."""
        return {
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": self.heads.softcap,
            "sm_scale": self.heads.scale,
            "q_data_type": self.memory.data.dtype,
            "kv_data_type": self.memory.data.dtype,
        }


class _Captured:
    """The captured steps: one row of each sequence."""

    def __init__(self, owner: FlashInferPaged, wrappers: dict[int | None, Any]) -> None:
        self._owner = owner
        self._wrappers = wrappers

    def __call__(self, layer: int, query: Tensor) -> Tensor:
        """Computes one layer: [rows, heads, head_dim] -> [rows, heads * head_dim]."""
        memory = self._owner.memory
        wrapper = self._wrappers[self._owner.heads.windows[layer]]
        mixed: Tensor = wrapper.run(query.contiguous(), (keys_of(memory, layer), values_of(memory, layer)))
        return mixed.flatten(1)

    def again(self, host: HostPaged) -> None:
        """Plans the step again, from host memory."""
        owner = self._owner
        for window, wrapper in self._wrappers.items():
            wrapper.plan(*owner.tables(host), *owner.sizes(), **owner.options(window))


class _Eager:
    """All other steps: any number of rows."""

    def __init__(self, owner: FlashInferPaged, wrappers: _Wrappers, host: HostPaged) -> None:
        self._owner = owner
        self._wrappers = wrappers
        self._host = host
        size = owner.memory.block_size
        least = -(-LEAST_SHARED // size)
        self._groups = sharers(page_order(host, size), least) if None in owner.heads.windows else []
        self._members = [sequence for group in self._groups for sequence in group.sequences]
        self._others = sorted(set(range(len(host.ends))) - set(self._members))
        self._shared, self._apart = (self._rows(which) for which in (self._members, self._others))
        self._plan()

    def _rows(self, sequences: list[int]) -> Tensor:
        """The numbers of their rows, in this order."""
        ranges = [torch.arange(*self._host.starts[at : at + 2].tolist()) for at in sequences]
        return torch.cat([torch.arange(0), *ranges]).to(self._owner.memory.data.device)

    def __call__(self, layer: int, query: Tensor) -> Tensor:
        """Computes one layer: [rows, heads, head_dim] -> [rows, heads * head_dim]."""
        owner, wrappers = self._owner, self._wrappers
        cache = keys_of(owner.memory, layer), values_of(owner.memory, layer)
        query, window = query.contiguous(), owner.heads.windows[layer]
        if window is not None or not self._groups:
            mixed: Tensor = wrappers.prefill(window).run(query, cache)
            return mixed.flatten(1)
        mixed = torch.empty_like(query)
        mixed.index_copy_(0, self._shared, wrappers.cascade.run(query[self._shared], cache))
        if self._others:
            mixed.index_copy_(0, self._apart, wrappers.prefill(None).run(query[self._apart], cache))
        return mixed.flatten(1)

    def _plan(self) -> None:
        for window in dict.fromkeys(self._owner.heads.windows):
            if window is not None or not self._groups:
                self._plan_prefill(window, self._host)
        if self._groups:
            self._plan_cascade()
            if self._others:
                self._plan_prefill(None, _some(self._host, self._others))

    def _plan_prefill(self, window: int | None, host: HostPaged) -> None:
        owner = self._owner
        starts = torch.from_numpy(host.starts)
        self._wrappers.prefill(window).plan(
            starts, *owner.tables(host), *owner.sizes(), causal=True, **owner.options(window)
        )

    def _plan_cascade(self) -> None:
        owner = self._owner
        both = levels(self._host, self._groups, owner.memory.block_size)
        starts = [torch.from_numpy(level.starts) for level in both]
        tables = zip(*(owner.tables(level) for level in both), strict=True)
        self._wrappers.cascade.plan(starts, *map(list, tables), *owner.sizes(), causal=True, **owner.options(None))

    def again(self, host: HostPaged) -> None:
        """Is not called: these steps are not captured."""
        raise NotImplementedError


def _some(host: HostPaged, sequences: list[int]) -> HostPaged:
    """Only these sequences."""
    counts = np.diff(host.starts)[sequences].tolist()
    return host_paged(host.ends[sequences].tolist(), counts, list(host.tables[sequences]), host.tables.shape[1])
