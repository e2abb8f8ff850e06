"""Paged attention through torch.nn.attention.varlen.

`varlen_attn` has taken a block table since torch 2.12, but computes with one only where another kernel is installed and
activated: flash attention 3 (compute capability 9) or 4 (10). Torch's own kernel, flash attention 2, refuses. It
computes in float16 and bfloat16 and has no soft cap. All strides but the last are free, so it reads a layer's view of
the page memory as it is. One split of the context (`num_splits=1`) makes a sequence's result independent of its batch,
as torch documents.

It has no cascade: nothing in its interface says that sequences share pages, so a shared page is read for each of them.

This is written against the documented interface; it has not run on a GPU yet.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import torch
from torch import Tensor

from penstock.engine.kernels.cuda.paged import Attend, Heads, HostPaged, Paged, keys_of, values_of
from penstock.engine.step.memory import PageMemory

_KERNELS = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute")}
"""By major compute capability: torch's name of the kernel, and the module that contains it."""
_WANTED = ("seqused_k", "block_table", "enable_gqa", "window_size", "scale", "num_splits")


def missing(heads: Heads, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Why `varlen_attn` can't be used with this device or model; None when it can be tried."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not in {dtype}"
    if heads.softcap is not None:
        return "it has no soft cap of scores"
    if heads.dim > 256:
        return f"heads of {heads.dim} are too wide: 256 is the most"
    if capability[0] not in _KERNELS:
        return f"its paging needs compute capability 9 or 10, this device has {capability[0]}.{capability[1]}"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        return str(error)
    lacking = [name for name in _WANTED if name not in inspect.signature(varlen_attn).parameters]
    if lacking:
        return f"that of torch {torch.__version__} lacks {', '.join(lacking)}"
    name, module = _KERNELS[capability[0]]
    try:
        found = importlib.util.find_spec(module)
    except ImportError:  # the package around the module is missing
        found = None
    return None if found is not None else f"its paging needs {name} here, and {module} is not installed"


def activate(capability: tuple[int, int]) -> Any:
    """Returns torch's `varlen_attn` after activating a kernel that reads pages. The whole process uses that kernel for
    flash attention from then on."""
    from torch.nn import attention
    from torch.nn.attention.varlen import varlen_attn

    name, _ = _KERNELS[capability[0]]
    if attention.current_flash_attention_impl() != name:
        attention.activate_flash_attention_impl(name)
    return varlen_attn


def deactivate() -> None:
    """Activates torch's own kernel again."""
    from torch.nn import attention

    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


class VarlenPaged:
    """PagedAttention by torch's `varlen_attn`."""

    name = "varlen"
    most_rows: int | None = None
    graph_rows = 16

    def __init__(self, heads: Heads, memory: PageMemory, varlen_attn: Any) -> None:
        self.heads = heads
        self.memory = memory
        self.attn = varlen_attn

    def begin(self, paged: Paged, host: HostPaged, fixed: bool) -> Attend:
        """Prepares the attention of one step; `fixed` says that the step will be captured."""
        return _Step(self, paged)


class _Step:
    def __init__(self, owner: VarlenPaged, paged: Paged) -> None:
        self._owner = owner
        self._paged = paged

    def __call__(self, layer: int, query: Tensor) -> Tensor:
        """Computes one layer: [rows, heads, head_dim] -> [rows, heads * head_dim]. Causality is aligned to the end: a
        sequence's last row sees all its tokens."""
        owner, paged = self._owner, self._paged
        window = owner.heads.windows[layer]
        mixed: Tensor = owner.attn(
            query.contiguous(),
            keys_of(owner.memory, layer),
            values_of(owner.memory, layer),
            paged.starts,
            None,
            paged.most_rows,
            paged.most_tokens,
            scale=owner.heads.scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=owner.heads.heads != owner.heads.kv_heads,
            seqused_k=paged.ends,
            block_table=paged.tables,
            num_splits=1,
        )
        return mixed.flatten(1)

    def again(self, host: HostPaged) -> None:
        """Does nothing: the kernels read the changed tensors."""
