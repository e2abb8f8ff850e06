"""What a process finds out about the place where it runs: enough files, shared memory, room on a disk. For
`penstock ctl doctor`, so each finding says what to do. These functions may block."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.config import format_size

LEAST_FILES = 4096
"""Open files that a busy service may need: one for each connection and each file of a tier."""
_SHM = Path("/dev/shm")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    """Its name, such as `open files`."""
    ok: bool
    found: str
    advice: str = ""
    """What to do; empty: nothing."""


def open_files(least: int = LEAST_FILES) -> Finding:
    """Whether this process may open enough files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = limit == resource.RLIM_INFINITY
    used = _used_files()
    found = f"{used} open, {'any number' if unlimited else limit} allowed"
    if unlimited or limit >= max(least, 2 * used):
        return Finding("open files", True, found)
    right = f"raise the limit to {max(least, 2 * used)} or more: `ulimit -n`, LimitNOFILE= of systemd, --ulimit nofile="
    return Finding("open files", False, found, right)


def shared_memory(wanted: int = 0, path: Path = _SHM) -> Finding:
    """Whether files in memory can be made in `path`, of `wanted` bytes together."""
    right = f"mount a tmpfs that this user may write to at {path}, as docker's --shm-size and Kubernetes' emptyDir do"
    if not path.is_dir():
        return Finding("shared memory", False, f"there is no {path}", right)
    reason = _writable(path)
    if reason:
        return Finding("shared memory", False, f"{path} is not writable: {reason}", right)
    room = shutil.disk_usage(path)
    found = f"{_about(room.free)} free of {_about(room.total)} in {path}"
    if room.free < max(wanted, _MIB):
        return Finding("shared memory", False, found, f"make room for {_about(max(wanted, _MIB))} there: {right}")
    return Finding("shared memory", True, found)


def disk(directory: Path, wanted: int, held: int) -> Finding:
    """Whether a tier of `wanted` bytes, of which it has `held` already, can be kept in `directory`."""
    if not directory.is_dir():
        right = "make it, or give another one with --nvme-dir, and start the store again"
        return Finding("disk", False, f"{directory} is not a directory", right)
    reason = _writable(directory)
    if reason:
        right = "mount it writable, and let the user of the store own it; until then blocks stay in memory"
        return Finding("disk", False, f"{directory} is not writable: {reason}", right)
    free = shutil.disk_usage(directory).free
    found = f"{_about(free)} free in {directory}, the tier has {_about(held)} of {_about(wanted)}"
    if free < wanted - held:
        return Finding("disk", False, found, f"free {_about(wanted - held - free)} there, or lower --nvme-bytes")
    return Finding("disk", True, found)


def _used_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def _writable(directory: Path) -> str:
    """Why nothing can be written to a file there; empty: it can."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".penstock-doctor-") as file:
            file.write(b"penstock")
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _about(size: int) -> str:
    """Sizes for people: whole MiB."""
    return format_size(max(0, size) // _MIB * _MIB) if size >= _MIB else format_size(max(0, size))
