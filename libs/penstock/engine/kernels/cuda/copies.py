"""Pages between host and device, on streams of their own, beside the steps.

A copy up must not overtake a step that still reads what the page held before, nor a copy down the step that computes
it: both wait, on the device, for the last step that was submitted (`mark`). The host waits at the end of each call, so
that what it copied from is free and what it copied to is there. All methods but `mark` from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from penstock.engine.hooks import Check, Source
from penstock.engine.kernels.cuda.streams import new_stream, recorded


class PageCopies:
    """Copies of the pages `content` [pages, bytes], uint8 on a CUDA device."""

    def __init__(self, content: Tensor) -> None:
        self._content = content
        self._up = new_stream(content.device)
        self._down = new_stream(content.device)
        self._computed = recorded(torch.cuda.current_stream(content.device))

    def mark(self, wait: bool) -> None:
        """A step was submitted on the current stream. By the thread that submits steps; `wait`: until it is over."""
        self._computed = recorded(torch.cuda.current_stream(self._content.device))
        if wait:
            self._computed.synchronize()

    def read(self, page: int) -> Tensor:
        """The page's bytes in pinned memory of their own."""
        copy = torch.empty(self._content.shape[1], dtype=torch.uint8, pin_memory=True)
        with self._on(self._down):
            copy.copy_(self._content[page], non_blocking=True)
        return copy

    def write(self, pages: Sequence[int], blocks: Sequence[Source], check: Check | None) -> int:
        """Copies each block to its page, up to one that `check` refuses, which does not reach its page. Returns how
        many are good."""
        with self._on(self._up):
            for index, (page, block) in enumerate(zip(pages, blocks, strict=True)):
                if not isinstance(block, memoryview):
                    self._content[page].copy_(from_dlpack(block), non_blocking=True)
                    continue
                pinned = torch.empty(self._content.shape[1], dtype=torch.uint8, pin_memory=True)
                copy = pinned.numpy()
                np.copyto(copy, np.frombuffer(block, np.uint8))
                if check is not None and not check(index, copy.data):
                    return index
                self._content[page].copy_(pinned, non_blocking=True)
        return len(blocks)

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Submits to the stream, behind the last step, and waits at the end for what was submitted."""
        stream.wait_event(self._computed)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            recorded(stream).synchronize()
