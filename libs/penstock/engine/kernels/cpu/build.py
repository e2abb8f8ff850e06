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
_WARNINGS = "-Wall -Wextra -Wno-psabi -Wno-maybe-uninitialized"  # the last is wrong about the compiler's own headers
_FLAGS = f"-O3 -std=c++20 -fPIC -shared -pthread -ffp-contract=fast {_WARNINGS}".split()
_MARCH = {
    "x86_64": {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "baseline": "x86-64"},
    "aarch64": {"baseline": "armv8-a"},
}
_LIMIT_S = 300


class NotBuilt(Exception):
    """There is no compiler, or it failed; says why."""


def instruction_sets() -> list[str]:
    """What this processor runs, the best first."""
    known = list(_MARCH.get(platform.machine(), ()))
    found = torch.backends.cpu.get_cpu_capability().split("_")[0].lower()
    return known[known.index(found) :] if found in known else known[-1:]


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
    march = _MARCH[platform.machine()][isa or sets[0]]
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    digest = hashlib.sha256(repr((_FLAGS, march)).encode())
    for name in _SOURCES:
        digest.update((_HERE / name).read_bytes())
    path = directory / f"{march}-{digest.hexdigest()[:24]}.so"
    try:
        if path.exists():
            return path
        if compiler is None:
            raise NotBuilt("there is no C++ compiler (g++ or clang++)")
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(directory / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the file
            if not path.exists():
                _compile(compiler, march, path)
    except OSError as error:
        raise NotBuilt(f"{directory}: {error.strerror or error}") from None
    return path


def _compile(compiler: str, march: str, path: Path) -> None:
    """Under another name first, so that nobody loads half a library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as room:
        part = Path(room) / path.name
        command = (compiler, *_FLAGS, f"-march={march}", *_COMPILED, "-o", str(part))
        try:
            done = subprocess.run(command, cwd=_HERE, capture_output=True, text=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise NotBuilt(f"{compiler} took more than {_LIMIT_S} s") from None
        if done.returncode:
            raise NotBuilt(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
        os.replace(part, path)


if __name__ == "__main__":
    print(cached(kernels_directory()))
