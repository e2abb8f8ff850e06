"""Memory as flat tensors of bytes: fresh from the system, or mapped from a file."""

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
"""Bytes of a file that are brought into memory at a time, and how many such pieces at once: disks are faster then."""
_LIBC = ctypes.CDLL(None)
_POPULATE_READ = 22
"""madvise's MADV_POPULATE_READ, of Linux 5.14."""


def anonymous(nbytes: int) -> Tensor:
    """uint8 [nbytes] of zeros, which take memory only when they are written; in huge pages if the system has some."""
    memory = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE:
        _advise(memory, mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)


def populated(file: int, nbytes: int) -> Tensor:
    """uint8 [nbytes]: the file's bytes, shared with every process that maps it. Writing to them ends the process.

    All pages are brought into memory, so that a first pass meets no page faults. They are huge where the file system
    supports it, which also makes it read large pieces.
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
    """Brings a piece into memory; returns whether the system can do that. Unlike mmap's own method, this releases the
    interpreter lock meanwhile."""
    failed: int = _LIBC.madvise(c_void_p(address), c_size_t(nbytes), _POPULATE_READ)
    return not failed


def _advise(memory: mmap.mmap, advice: int) -> bool:
    """Advises the system; returns whether it took the advice, as older systems don't know every kind."""
    try:
        memory.madvise(advice)
    except OSError:
        return False
    return True


def _tensor(memory: mmap.mmap, nbytes: int) -> Tensor:
    """A tensor over the mapping, which it keeps alive. It is made through ctypes, because torch warns of read-only
    memory."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    window = (ctypes.c_char * nbytes).from_address(address)
    window.mapping = memory  # type: ignore[attr-defined]
    return torch.frombuffer(window, dtype=torch.uint8)
