"""Memory as flat tensors of bytes: fresh from the system, or a file's."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import torch
from torch import Tensor

_HUGE = 2 << 20
_POPULATE_READ = 22
"""madvise's MADV_POPULATE_READ, of Linux 5.14."""


def anonymous(nbytes: int) -> Tensor:
    """uint8 [nbytes]: zeros that cost memory once they are written, in huge pages where the system gives some."""
    memory = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE:
        _advise(memory, mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)


def populated(file: int, nbytes: int) -> Tensor:
    """uint8 [nbytes]: the file's bytes, shared with all who map it. Writing to it ends the process.

    All pages are there: a first pass meets no page faults. They are huge ones where the file system can, which also
    makes it read in large pieces.
    """
    memory = mmap.mmap(file, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
    _advise(memory, mmap.MADV_HUGEPAGE)
    if not _advise(memory, _POPULATE_READ):
        _advise(memory, mmap.MADV_WILLNEED)
    return _tensor(memory, nbytes)


def _advise(memory: mmap.mmap, advice: int) -> bool:
    """Whether the system took the advice: older ones don't know every kind."""
    try:
        memory.madvise(advice)
    except OSError:
        return False
    return True


def _tensor(memory: mmap.mmap, nbytes: int) -> Tensor:
    """Through ctypes, because torch warns of read-only memory; the tensor keeps the mapping alive."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    window = (ctypes.c_char * nbytes).from_address(address)
    window.mapping = memory  # type: ignore[attr-defined]
    return torch.frombuffer(window, dtype=torch.uint8)
