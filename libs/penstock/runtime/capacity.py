"""Checks, before anything is started or written, that this machine has enough memory, disk and device memory."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from penstock.runtime.config import ConfigError, format_size

_LEAST_BYTES = 1 << 16
_MIB = 1 << 20
_PAGE = 4096
LEAST_BLOCKS = 16
"""A tier with fewer blocks could not keep even a short prompt."""
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_host_bytes(field: str, size: int) -> None:
    """Raises ConfigError unless a host tier of `size` bytes can be had."""
    _check(field, size, memory_bytes(), "this machine has {} of memory")


def check_nvme(dir_field: str, directory: Path | None, bytes_field: str, size: int) -> None:
    """Raises ConfigError unless there can be a disk tier of `size` bytes in `directory`; neither given is fine.

    What the directory holds already counts as room: it is the tier's own, from an earlier run.
    """
    if directory is None:
        if size:
            raise ConfigError(dir_field, "", f"{bytes_field} is set; give the directory for it, too")
        return
    if not size:
        raise ConfigError(bytes_field, size, f"{dir_field} is set; say how much of it may be used, for example 20GiB")
    there = _nearest(dir_field, directory)
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(dir_field, str(directory), f"{there} is not writable; choose a directory that is")
    _check(bytes_field, size, shutil.disk_usage(there).free + _held(directory), f"there is room for {{}} in {there}")


def check_gpu_bytes(field: str, size: int, device: Callable[[], int] | None = None) -> None:
    """Raises ConfigError unless the first GPU has `size` bytes; 0 asks for none. `device` gives its bytes."""
    if not size:
        return
    most = (device or gpu_bytes)()
    if not most:
        raise ConfigError(field, format_size(size), "there is no CUDA device here; leave it out")
    _check(field, size, most, "the GPU has {} of memory")
    if importlib.util.find_spec("cupy") is None:
        right = "needs cupy: pip install 'penstock[cuda12]' or 'penstock[cuda13]', as the driver has it"
        raise ConfigError(field, format_size(size), right)


def check_blocks(field: str, size: int, block_bytes: int) -> None:
    """Raises ConfigError for a tier too small for a few blocks of that size; 0 means no tier."""
    least = LEAST_BLOCKS * (-(-block_bytes // _PAGE) + 2) * _PAGE  # headers and alignment included
    if 0 < size < least:
        what = f"{LEAST_BLOCKS} blocks of this model, with {format_size(block_bytes)} each"
        raise ConfigError(field, format_size(size), f"at least {format_size(least)}: {what}")


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or the container's limit when that is less."""
    least = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _CGROUP_LIMITS:
        try:
            least = min(least, int(path.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return least


def gpu_bytes() -> int:
    """Memory of the first CUDA device, asked of the driver without taking any of it; 0: there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    device, size = ctypes.c_int(), ctypes.c_size_t()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    )
    return 0 if failed else size.value


def _check(field: str, size: int, most: int, what: str) -> None:
    """`what` says how much there is, with a place for the number."""
    if size > most:
        possible = format_size(most - most % _MIB)
        raise ConfigError(field, format_size(size), f"{what.format(possible)}; use less than that")
    if size < _LEAST_BYTES:
        raise ConfigError(field, format_size(size), f"at least {format_size(_LEAST_BYTES)}")


def _nearest(field: str, directory: Path) -> Path:
    """The directory itself, or the nearest of its parents that exists."""
    there = directory.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ConfigError(field, str(directory), f"{there} is not a directory; choose another place")
    return there


def _held(directory: Path) -> int:
    if not directory.is_dir():
        return 0
    return sum(file.stat().st_blocks * 512 for file in directory.rglob("*") if file.is_file() and not file.is_symlink())
