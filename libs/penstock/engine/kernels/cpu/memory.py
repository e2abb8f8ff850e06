"""Memory as flat tensors of bytes: fresh from the system, or a file's."""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_size_t, c_void_p

import numpy as np
import torch
from torch import Tensor

_HUGE = 2 << 20
_PIECE, _AT_ONCE = 32 << 20, 4
"""Of a file that is brought to memory: a disk wants to be asked for several things at once."""
_LIBC = ctypes.CDLL(None)
_POPULATE_READ = 22
"""madvise's MADV_POPULATE_READ, of Linux 5.14."""


def anonymous(nbytes: int) -> Tensor:
    """uint8 [nbytes]: zeros that cost memory only when they are written, in huge pages where the system has some."""
    memory = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE:
        _advise(memory, mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)


def populated(file: int, nbytes: int) -> Tensor:
    """uint8 [nbytes]: the file's bytes, shared with all who map it. Writing to it ends the process.

    All pages are brought in, so a first pass meets no page faults. Pages are huge where the file system supports
    it, which also makes it read in large pieces.
    """
    memory = mmap.mmap(file, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
    _advise(memory, mmap.MADV_HUGEPAGE)
    content = _tensor(memory, nbytes)
    pieces = range(0, nbytes, _PIECE)
    with ThreadPoolExecutor(min(_AT_ONCE, len(pieces))) as executor:
        known = all(executor.map(lambda at: _populate(content.data_ptr() + at, min(_PIECE, nbytes - at)), pieces))
    if not known:
        _advise(memory, mmap.MADV_WILLNEED)
    return content


def _populate(address: int, nbytes: int) -> bool:
    """Whether the system can do it. Unlike mmap's own method, this lets go of the interpreter lock meanwhile."""
    failed: int = _LIBC.madvise(c_void_p(address), c_size_t(nbytes), _POPULATE_READ)
    return not failed


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
