"""Compiles the C++ sources once per machine and instruction set, and keeps the result.

The library stands on nothing but the C++ runtime: no header of torch or Python is compiled in, so one build serves
every version of both, and takes seconds.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from penstock.runtime.caches import cache_directory

_HERE = Path(__file__).parent
_COMPILED = sorted(path.name for path in _HERE.glob("*.cpp"))
_SOURCES = [*sorted(path.name for path in _HERE.glob("*.h")), *_COMPILED]
_WARNINGS = "-Wall -Wextra -Wno-psabi -Wno-maybe-uninitialized -Wno-uninitialized"
"""The last two are wrong about the compiler's own headers."""
_FLAGS = f"-O3 -std=c++20 -fPIC -shared -pthread -ffp-contract=fast {_WARNINGS}".split()
_TARGETS = {
    "x86_64": {
        "amx": "-march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16",
        "avx512_bf16": "-march=x86-64-v4 -mavx512bf16",
        "avx512": "-march=x86-64-v4",
        "avx2": "-march=x86-64-v3",
        "baseline": "-march=x86-64",
    },
    "aarch64": {"baseline": "-march=armv8-a"},
}
_LIMIT_S = 300


class NotBuilt(Exception):
    """There is no compiler, or it failed; says why."""


@functools.cache
def instruction_sets() -> list[str]:
    """What this processor runs, the best first."""
    known = list(_TARGETS.get(platform.machine(), ()))
    found = torch.backends.cpu.get_cpu_capability().split("_")[0].lower()
    if found == "avx512" and "avx512_bf16" in (flags := _flags()):
        found = "amx" if {"amx_tile", "amx_bf16"} <= flags and _tiles_allowed() else "avx512_bf16"
    return known[known.index(found) :] if found in known else known[-1:]


def _flags() -> set[str]:
    """What Linux says that the processor has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _tiles_allowed() -> bool:
    """Asks Linux for the room that a thread's tiles take whenever it is not running: a process has to, once."""
    arch_prctl, request, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0)


@functools.cache
def library(isa: str = "") -> ctypes.CDLL:
    """The library for an instruction set, by default the best, compiled when it is not there yet. Raises NotBuilt."""
    path = cached(kernels_directory(), isa)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotBuilt(f"{path}: {error}") from None


def kernels_directory() -> Path:
    """Where compiled libraries are kept."""
    return cache_directory("kernels")


def cached(directory: Path, isa: str = "") -> Path:
    """The library in `directory`. Of several processes that want it at once, one compiles and the others wait."""
    sets = instruction_sets()
    if not sets:
        raise NotBuilt(f"there are no kernels for {platform.machine()}")
    isa = isa or sets[0]
    target = _TARGETS[platform.machine()][isa].split()
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    digest = hashlib.sha256(repr((_FLAGS, target)).encode())
    for name in _SOURCES:
        digest.update((_HERE / name).read_bytes())
    path = directory / f"{isa}-{digest.hexdigest()[:24]}.so"
    try:
        if path.exists():
            return path
        if compiler is None:
            raise NotBuilt("there is no C++ compiler (g++ or clang++)")
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(directory / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the file
            if not path.exists():
                _compile(compiler, target, path)
    except OSError as error:
        raise NotBuilt(f"{directory}: {error.strerror or error}") from None
    return path


def _compile(compiler: str, target: list[str], path: Path) -> None:
    """Under another name first, so that nobody loads half a library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as room:
        part = Path(room) / path.name
        command = (compiler, *_FLAGS, *target, *_COMPILED, "-o", str(part))
        try:
            done = subprocess.run(command, cwd=_HERE, capture_output=True, text=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise NotBuilt(f"{compiler} took more than {_LIMIT_S} s") from None
        if done.returncode:
            raise NotBuilt(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
        os.replace(part, path)


if __name__ == "__main__":
    print(cached(kernels_directory()))
