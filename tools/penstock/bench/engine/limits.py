"""What the machine can do: reading memory, and multiplying."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable

import torch

from penstock.engine.kernels.cpu.build import NotBuilt, library

_BYTES = 256 << 20
"""Far more than caches hold."""
_PASSES = 2


class Memory:
    """Reads the same bytes again and again, with as many threads as the engines have."""

    def __init__(self, threads: int, size: int = _BYTES) -> None:
        room = mmap.mmap(-1, size)
        room.madvise(mmap.MADV_HUGEPAGE)  # with small pages, half of the time goes into page tables
        self._content = torch.frombuffer(room, dtype=torch.int64).fill_(1)
        self._read = _reader(threads)

    def rate(self) -> float:
        """Bytes/s of the best of a few passes, which was disturbed least."""
        best = min(self._read(self._content, places) for places in (1, 4) for _ in range(_PASSES))
        return self._content.nbytes / best


def gemm_rate(dtype: torch.dtype, rows: int = 512, inputs: int = 2048, outputs: int = 8192, passes: int = 3) -> float:
    """Operations/s of torch's product at the shape of a prefill's, the best of a few."""
    x, matrix = torch.ones(rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
    seconds = []
    for _ in range(passes):
        begin = time.perf_counter()
        torch.nn.functional.linear(x, matrix)
        seconds.append(time.perf_counter() - begin)
    return 2.0 * rows * inputs * outputs / min(seconds)


def _reader(threads: int) -> Callable[[torch.Tensor, int], float]:
    """Seconds of one pass: our own loop, or torch's sum where there is no compiler."""
    try:
        function = library().penstock_read
    except NotBuilt:
        return _summed
    total = ctypes.c_uint64()

    def read(content: torch.Tensor, places: int) -> float:
        seconds: float = function(content.data_ptr(), content.nbytes, threads, places, ctypes.addressof(total))
        return seconds

    return read


def _summed(content: torch.Tensor, places: int) -> float:
    begin = time.perf_counter()
    content.sum()
    return time.perf_counter() - begin
