"""Copies pages between host and device while steps run, on streams of its own.

A copy to the device must not overtake a step that still reads the page's former content, and a copy to the host must
not overtake the step that computes the page. So both wait, on the device, for the last step that was submitted
(`mark`). The host waits at the end of each call: then the source is free and the destination is complete. All methods
but `mark` may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from penstock.engine.hooks import Copy, Source
from penstock.engine.kernels.cuda.streams import new_stream, recorded


class PageCopies:
    """Copies of the pages `content` [pages, bytes], uint8 on a CUDA device."""

    def __init__(self, content: Tensor) -> None:
        self._content = content
        self._up = new_stream(content.device)
        self._down = new_stream(content.device)
        self._computed = recorded(torch.cuda.current_stream(content.device))

    def mark(self, wait: bool) -> None:
        """Notes that a step was submitted on the current stream; `wait`: returns when the step is over. Only the thread
        that submits steps calls this."""
        self._computed = recorded(torch.cuda.current_stream(self._content.device))
        if wait:
            self._computed.synchronize()

    def read(self, page: int) -> Tensor:
        """Returns a copy of the page in pinned memory."""
        copy = torch.empty(self._content.shape[1], dtype=torch.uint8, pin_memory=True)
        with self._on(self._down):
            copy.copy_(self._content[page], non_blocking=True)
        return copy

    def write(self, pages: Sequence[int], blocks: Sequence[Source], copy: Copy | None) -> int:
        """Copies each block to its page, and stops before the first that `copy` refuses. Returns how many were
        copied."""
        with self._on(self._up):
            for index, (page, block) in enumerate(zip(pages, blocks, strict=True)):
                if not isinstance(block, memoryview):
                    self._content[page].copy_(from_dlpack(block), non_blocking=True)
                    continue
                pinned = torch.empty(self._content.shape[1], dtype=torch.uint8, pin_memory=True)
                there = pinned.numpy()
                if copy is None:
                    np.copyto(there, np.frombuffer(block, np.uint8))
                elif not copy(index, there.data):
                    return index
                self._content[page].copy_(pinned, non_blocking=True)
        return len(blocks)

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Submits copies to the stream, behind the last step, and waits for them at the end of the block."""
        stream.wait_event(self._computed)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            recorded(stream).synchronize()
