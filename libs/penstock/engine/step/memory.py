"""The memory behind the page numbers.

Page-major: one page holds the keys and values of `block_size` tokens for all layers in one contiguous run of
bytes, which is exactly the block that is stored and sent. The price is that a layer's keys are gathered from as
many places as the sequence has pages, which gathering does anyway.

Layers with a sliding window keep all their tokens as well: a block that another request reuses has to be whole, and
a page is one piece. Their windows save time (see batch), not memory. What is fetched of a long prefix need not be
whole: where only the far part of a block came (see penstock.kv.parts), the rest of its page is zero.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from penstock.checkpoint import ModelConfig
from penstock.engine.hooks import Copy, Source
from penstock.engine.step.changes import PageChanges
from penstock.engine.step.int8_kv import SCALE_BYTES, from_rows, to_rows
from penstock.kv.bytes.arena import Arena, Layout
from penstock.kv.device.leased import PoolLease
from penstock.kv.parts import BlockParts, Reach

_LAYOUTS = {2: "lkbhd", 1: "lbhd"}
"""Order of a block's axes by the planes of a layer: layer, key then value if both are kept, token, KV head, head
dimension; little-endian, no padding. Where it is "scaled", numbers are int8, and the float32 scales of a token's heads
are behind them, see int8_kv."""

_BFLOAT16_EXPONENT = np.uint16(0x7F80)
"""The bits of the exponent; all of them are set in a number that is not finite."""


class SharedArena(Protocol):
    """Memory of a device that other processes can open."""

    bytes: Tensor
    """uint8 [size], zeros."""

    def lease(self, page_bytes: int, pages: int) -> PoolLease:
        """Lets another process read the pages."""
        ...


class PageTransfer(Protocol):
    """Copies pages between a device and the host while steps run."""

    def mark(self, wait: bool) -> None:
        """Later copies come after the step that this thread has submitted; `wait`: returns when the step is over."""
        ...

    def read(self, page: int) -> Tensor:
        """The page's bytes, in host memory of their own."""
        ...

    def write(self, pages: Sequence[int], blocks: Sequence[Source], copy: Copy | None) -> int:
        """Copies blocks to pages as PageMemory.write does."""
        ...


class DeviceMemory(Protocol):
    """Memory and copies of a CUDA device, see kernels/cuda/memory.py."""

    def arena(self, nbytes: int) -> SharedArena | None:
        """Allocates `nbytes` of memory; None when the device cannot share its memory."""
        ...

    def copies(self, content: Tensor) -> PageTransfer:
        """Copies of the pages `content`: uint8 [pages, bytes]."""
        ...


class KvMemory(Protocol):
    """Where layers keep what they make of tokens: the pages, or of several processes the part that one has of them."""

    planes: int
    block_size: int
    n_layers: int
    first_layer: int
    """Of those that it has."""

    def store(self, places: Tensor, vectors: Tensor) -> None:
        """See PageMemory."""
        ...

    def gather(self, index: Tensor, batch: int, tokens: int) -> tuple[Tensor, ...]:
        """See PageMemory."""
        ...


class PageMemory:
    """`data` is [1 + pages, layers, planes, block_size, heads, width], see KvForm; page 0 stays zero (see PagePool). In
    int8 the last two axes are one, a row of int8_kv.

    On a CUDA device one more page lies behind them, for rows of captured steps that are padding, and all are one arena
    that other processes can open, where that is possible.
    """

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        memory: DeviceMemory | None = None,
        shared: bool = False,
        content: memoryview | None = None,
        layers: range | None = None,
    ) -> None:
        """`memory` belongs to `device` when this is a CUDA device; None on a CPU, and for a part of other pages.
        `shared`: other processes can map the pages of a CPU. `content`: the pages of another process. `layers`: those
        that the pages have; None: all."""
        cuda = memory is not None
        form = config.kv
        layers = range(config.n_layers) if layers is None else layers
        self._heads = (form.heads, form.width)
        self._scaled = dtype == torch.int8
        own, last = _page_shape(config, block_size, dtype)
        shape = (pages + 1 + cuda, len(layers), *own[1:])
        self.planes = form.planes
        self.block_size = block_size
        self.n_layers, self.first_layer = len(layers), layers.start
        self._arena = memory.arena(math.prod(shape) * dtype.itemsize) if memory is not None else None
        self.arena: Arena | None = None
        """The pages as others map them, if they can; slot i is page i."""
        self.changes: PageChanges | None = None
        """Told of what is written here outside of steps, where somebody has to know."""
        if content is not None:
            self.data = torch.frombuffer(content, dtype=dtype).view(shape)
        elif self._arena is None and shared and device.type == "cpu":
            page_bytes = math.prod(shape[1:]) * dtype.itemsize
            self.arena = _arena(shape[0], page_bytes)
            self.data = torch.frombuffer(self.arena.slots(), dtype=dtype).view(shape)
        elif self._arena is None:
            self.data = _zeros(shape, dtype, device)
        else:
            self.data = self._arena.bytes.view(dtype).view(shape)
        width = math.prod(last)
        self.strips = self.data.view(-1, block_size * width)
        """[pages * layers * planes, block_size * width]: strip (page * layers + layer) * planes is keys, if they are a
        plane of their own, and the next one values; layers are counted from `first_layer` on."""
        self.vectors = self.data.view(-1, width)
        """[pages * layers * planes * block_size, width]: a token's row in one plane of one layer."""
        self._scratch = self.data.new_empty(0)
        self._bytes = self.data.view(shape[0], -1).view(torch.uint8)
        self.block_bytes = self._bytes.shape[1]
        self.parts = block_parts(config, self.block_bytes)
        """Of a block; None where all layers look at everything."""
        self.layout = f"{_LAYOUTS[self.planes]}{'-scaled' if self._scaled else ''}-v1"
        """How the bytes of a block are ordered."""
        self._host = self._bytes.numpy() if device.type == "cpu" else None
        self._copies = memory.copies(self._bytes) if memory is not None else None

    @staticmethod
    def page_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of a page."""
        return math.prod(_page_shape(config, block_size, dtype)[0]) * dtype.itemsize

    @property
    def heads(self) -> tuple[int, int]:
        """(heads, width) of a plane's row."""
        return self._heads

    @property
    def scaled(self) -> bool:
        """Whether numbers are int8, with scales."""
        return self._scaled

    def close(self) -> None:
        """Nobody else can map the pages from now on; who has done so keeps them."""
        if self.arena is not None:
            self.arena.close()

    @property
    def lease(self) -> PoolLease | None:
        """IPC handle for other processes on this host, or None when the device cannot share its memory."""
        return None if self._arena is None else self._arena.lease(self.block_bytes, self.data.shape[0])

    def computed(self, wait: bool) -> None:
        """This thread has submitted a step: later copies come after it. `wait`: returns when the step is over."""
        if self._copies is not None:
            self._copies.mark(wait)

    def store(self, places: Tensor, vectors: Tensor) -> None:
        """Keeps rows of a plane, [N, heads * width], at `places` [N] of `vectors`."""
        kept = to_rows(vectors.view(-1, *self._heads)) if self._scaled else vectors.to(self.vectors.dtype)
        self.vectors.index_copy_(0, places, kept)

    def gather(self, index: Tensor, batch: int, tokens: int) -> tuple[Tensor, ...]:
        """The planes of one layer, keys and values for one, each [batch, tokens, heads, width], valid until the next
        call.

        `index` [planes * batch * pages] names rows of `strips`, all of a plane before those of the next; `tokens` cuts
        off the end of the last page. The copies go to one scratch buffer, which stays in the processor's cache. Numbers
        have the type in which they are kept; those of int8 come as float32.
        """
        count, width = index.shape[0], self.strips.shape[1]
        if self._scratch.numel() < count * width:
            self._scratch = self.data.new_empty(count * width * 5 // 4)
        found = self._scratch[: count * width].view(count, width)
        torch.index_select(self.strips, 0, index, out=found)
        if self._scaled:
            found = from_rows(found.view(-1, self.vectors.shape[1]), self._heads[0]).view(count, -1)
        each = found.view(self.planes, batch, -1, *self._heads)
        return tuple(plane[:, :tokens] for plane in each)

    def clear(self, page: int) -> None:
        """Zeroes a page: its last owner may have been another tenant, and may have left NaN in it."""
        self.data[page].zero_()
        if self.changes is not None:
            self.changes.cleared(page)

    def copy_rows(self, source: int, page: int, rows: int) -> None:
        """Makes the first `rows` tokens of `page` those of `source`, and zeroes the others as `clear` does. Call it in
        the thread that computes steps."""
        kept = self.data[page]
        kept[:, :, :rows] = self.data[source, :, :, :rows]
        kept[:, :, rows:] = 0
        if self.changes is not None:
            self.changes.written([page])

    def view(self, page: int) -> memoryview:
        """The page's bytes, read-only: the page itself on the CPU, a copy otherwise."""
        if self._copies is not None:
            content = self._copies.read(page).numpy()
        else:
            content = self._bytes[page].cpu().numpy() if self._host is None else self._host[page]
        view: memoryview = content.data
        return view.toreadonly()

    def read_into(self, page: int, destination: memoryview) -> None:
        if destination.nbytes != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, the destination {destination.nbytes}")
        np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(self.view(page), np.uint8))

    def write(self, pages: Sequence[int], blocks: Sequence[Source], copy: Copy | None = None, *, far: int = 0) -> int:
        """Copies each block's bytes to its page, up to one that `copy` refuses; returns how many are good. Of the first
        `far` in host memory `copy` copies the far part alone, and the rest of the page is zero.

        The interpreter lock is free while large ones are copied. No source is read after the call has returned.
        """
        good = self._write(pages, blocks, copy if copy is None or not far else self._into_zeros(copy, far))
        if self.changes is not None:
            self.changes.written(pages[:good])
        return good

    def _into_zeros(self, copy: Copy, far: int) -> Copy:
        """`copy` for far parts: what was in a page may be another tenant's, and a NaN that is masked is still a NaN."""
        near = [] if self.parts is None else self.parts.near

        def into_zeros(index: int, into: memoryview) -> bool:
            if index < far:
                there = np.frombuffer(into, np.uint8)
                for begin, end in near:
                    there[begin:end] = 0
            return copy(index, into)

        return into_zeros

    def _write(self, pages: Sequence[int], blocks: Sequence[Source], copy: Copy | None) -> int:
        if self._copies is not None:
            return self._copies.write(pages, blocks, copy)
        on_device = self._write_on_device(pages, blocks)
        for index, (page, block) in enumerate(zip(pages, blocks, strict=True)):
            if index < on_device:
                continue
            there = self._host[page] if self._host is not None else np.empty(self.block_bytes, np.uint8)
            if copy is None:
                np.copyto(there, np.frombuffer(cast(memoryview, block), np.uint8))
            elif not copy(index, there.data):
                return index
            if self._host is None:
                self._bytes[page].copy_(torch.from_numpy(there))
        return len(blocks)

    def sound(self, pages: Sequence[int]) -> bool:
        """Whether the pages hold finite numbers only. Call it in the thread that computes steps."""
        if self._host is not None:
            return all(self.finite(self._host[page].data) for page in pages)
        return bool(torch.isfinite(self.data[list(pages)]).all())

    def sound_rows(self, page: int, rows: int) -> bool:
        """Whether the first `rows` tokens of the page have finite numbers only. Call it in the thread that computes
        steps."""
        kept = self.data[page, :, :, :rows]
        if self._host is not None:
            return self.finite(kept.contiguous().view(torch.uint8).numpy().data)
        return bool(torch.isfinite(kept).all())

    def finite(self, block: memoryview) -> bool:
        """Whether a block in host memory, or rows of one, holds finite numbers only. Callable from any thread."""
        if self._scaled:
            rows = np.frombuffer(block, np.uint8).reshape(-1, self.vectors.shape[1])
            scales = np.ascontiguousarray(rows[:, -self._heads[0] * SCALE_BYTES :]).view(np.float32)
            return bool((np.isfinite(scales) & (scales > 0)).all())  # the kernels keep a vector of NaN as zeros
        if self.data.dtype == torch.float32:
            return bool(np.isfinite(np.frombuffer(block, np.float32)).all())
        exponents = np.frombuffer(block, np.uint16) & _BFLOAT16_EXPONENT
        return not bool((exponents == _BFLOAT16_EXPONENT).any())

    def _write_on_device(self, pages: Sequence[int], blocks: Sequence[Source]) -> int:
        """Copies the leading blocks that lie on the device, and returns how many."""
        there = list(takewhile(lambda block: not isinstance(block, memoryview), blocks))
        for page, block in zip(pages, there, strict=False):
            self._bytes[page].copy_(from_dlpack(block))
        return len(there)


def block_parts(config: ModelConfig, block_bytes: int) -> BlockParts | None:
    """The parts of a block, in which layers lie one behind the other; None where all look at everything."""
    windows = [window for window in config.windows if window is not None]
    if not windows:
        return None
    size, far = block_bytes // config.n_layers, list[tuple[int, int]]()
    for layer, window in enumerate(config.windows):
        if window is None:
            begin = far.pop()[0] if far and far[-1][1] == layer * size else layer * size
            far.append((begin, (layer + 1) * size))
    return BlockParts(block_bytes, tuple(far), Reach(max(windows), config.chunked))


def _page_shape(config: ModelConfig, block_size: int, dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(the shape of a page, its last axes: a token's row)."""
    form = config.kv
    last = (form.heads * (form.width + SCALE_BYTES),) if dtype == torch.int8 else (form.heads, form.width)
    return (config.n_layers, form.planes, block_size, *last), last


def _arena(pages: int, page_bytes: int) -> Arena:
    """Zeros that other processes can map. As `_zeros`, memory is taken when a page is used first."""
    layout = Layout.gapless(pages, page_bytes)
    arena = Arena(layout.offset(pages))
    arena.format(layout)
    return arena


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU fresh from the system, so that pages that were never used cost neither time nor memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
