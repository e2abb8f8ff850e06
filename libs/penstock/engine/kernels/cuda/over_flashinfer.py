"""Paged attention through flashinfer (Ye et al., 2025), when it is installed.

Its wrappers plan a step on the host and then run it layer by layer. Captured steps use decode wrappers with buffers of
their own, which are planned again before each replay. All other steps use prefill wrappers, which take any number of
rows. A layer's keys and values are given as a pair of strided views of the page memory in the layout NHD; the kernels
read the strides. Windows and soft caps are part of a plan, so there is one wrapper for each width of window.

This is written against the documented interface of flashinfer 0.7; it has not run on a GPU yet.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.kernels.cuda.paged import Attend, Heads, HostPaged, Int32s, Paged, keys_of, values_of
from penstock.engine.step.memory import PageMemory

_WORKSPACE = 128 << 20
"""Bytes that flashinfer asks for; they begin as zeros."""
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


class FlashInferPaged:
    """PagedAttention by flashinfer's wrappers."""

    name = "flashinfer"
    most_rows: int | None = None
    graph_rows = 1

    def __init__(self, heads: Heads, memory: PageMemory, flashinfer: Any) -> None:
        self.heads = heads
        self.memory = memory
        self._module = flashinfer
        self._eager: dict[int | None, Any] = {}
        self._space: Tensor | None = None

    def begin(self, paged: Paged, host: HostPaged, fixed: bool) -> Attend:
        """Prepares the attention of one step; `fixed` says that the step will be captured."""
        windows = dict.fromkeys(self.heads.windows)
        step: _Step
        if fixed:
            step = _Captured(self, {window: self._decoder(paged) for window in windows})
        else:
            for window in windows:
                if window not in self._eager:
                    self._eager[window] = self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace(), "NHD")
            step = _Eager(self, self._eager)
        step.again(host)
        return step

    def _workspace(self) -> Tensor:
        """The workspace of all wrappers, which share it because their steps run one after the other."""
        if self._space is None:
            self._space = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=self.memory.data.device)
        return self._space

    def _decoder(self, paged: Paged) -> Any:
        """A wrapper for a fixed number of sequences, with room for all pages that they may ever have."""
        sequences, device = paged.ends.shape[0], self.memory.data.device

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        return self._module.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace(),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=ints(sequences + 1),
            paged_kv_indices_buffer=ints(sequences * paged.tables.shape[1]),
            paged_kv_last_page_len_buffer=ints(sequences),
        )

    def options(self, window: int | None) -> dict[str, Any]:
        """The arguments of a plan that both kinds of wrapper take."""
        return {
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": self.heads.softcap,
            "sm_scale": self.heads.scale,
            "q_data_type": self.memory.data.dtype,
            "kv_data_type": self.memory.data.dtype,
        }


class _Step:
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
        heads, size = self._owner.heads, self._owner.memory.block_size
        tables = [torch.from_numpy(each) for each in flat(host, size)]
        for window, wrapper in self._wrappers.items():
            self._plan(wrapper, host, (*tables, heads.heads, heads.kv_heads, heads.dim, size), window)

    def _plan(self, wrapper: Any, host: HostPaged, what: tuple[Any, ...], window: int | None) -> None:
        raise NotImplementedError


class _Captured(_Step):
    """The captured steps: one row of each sequence."""

    def _plan(self, wrapper: Any, host: HostPaged, what: tuple[Any, ...], window: int | None) -> None:
        wrapper.plan(*what, **self._owner.options(window))


class _Eager(_Step):
    """All other steps: any number of rows."""

    def _plan(self, wrapper: Any, host: HostPaged, what: tuple[Any, ...], window: int | None) -> None:
        wrapper.plan(torch.from_numpy(host.starts), *what, causal=True, **self._owner.options(window))
