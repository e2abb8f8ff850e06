"""The memory of the pages on a CUDA device, and the copies to and from them."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.kernels.cuda.arena import PoolArena, open_arena
from penstock.engine.kernels.cuda.copies import PageCopies


class CudaMemory:
    """The memory of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def arena(self, nbytes: int) -> PoolArena | None:
        """Memory of zeros that other processes can open; None when the device can't share its memory."""
        return open_arena(nbytes, self._device)

    def copies(self, content: Tensor) -> PageCopies:
        """Copies of the pages `content` [pages, bytes], uint8."""
        return PageCopies(content)
