"""Compiles the C++ sources once per machine and instruction set, and keeps the result; or all instruction sets beside
the sources, for an image that has no compiler.

The library needs only the C++ runtime. No header of torch or Python is compiled in, so one build serves every version
of both and takes seconds. It is kept in a file and a directory that only this user can write; otherwise it is not
loaded, and torch computes. Beside the sources root may have put it as well, as it did the sources.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import torch

from penstock.engine.kernels.cpu import layout
from penstock.runtime.caches import cache_directory
from penstock.runtime.private import locked, open_directory, open_file

_HERE = Path(__file__).parent
PREBUILT = _HERE / "prebuilt"
"""Libraries that were installed with the sources. Their names hold a digest of these, so others are not found."""
_COMPILED = sorted(path.name for path in _HERE.glob("*.cpp"))
_SOURCES = [*sorted(path.name for path in _HERE.glob("*.h")), *_COMPILED]
_WARNINGS = "-Wall -Wextra -Wno-psabi -Wno-maybe-uninitialized -Wno-uninitialized"
"""The last two are switched off because they are wrong about the compiler's own headers."""
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
    """The kernels cannot be had; the message says why."""


@functools.cache
def instruction_sets() -> list[str]:
    """The instruction sets that this processor runs, the best first."""
    known = list(_TARGETS.get(platform.machine(), ()))
    found = torch.backends.cpu.get_cpu_capability().split("_")[0].lower()
    if found == "avx512" and "avx512_bf16" in (flags := _flags()):
        found = "amx" if {"amx_tile", "amx_bf16"} <= flags and _tiles_allowed() else "avx512_bf16"
    return known[known.index(found) :] if found in known else known[-1:]


def _flags() -> set[str]:
    """The features that Linux reports for this processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _tiles_allowed() -> bool:
    """Asks Linux for permission to use tiles, as every process has to once: Linux must save them when it switches
    threads."""
    arch_prctl, request, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0)


@functools.cache
def library(isa: str = "") -> ctypes.CDLL:
    """The library for an instruction set, by default the best one; it is compiled if it is not there yet. Its functions
    have the types that layout.py gives them. Raises NotBuilt."""
    try:
        return load(present(isa) or cached(kernels_directory(), isa))
    except OSError as error:
        raise NotBuilt(str(error)) from None


def present(isa: str = "") -> Path | None:
    """The library for an instruction set if it is there: as it was installed, else as this user has compiled it."""
    name = file_name(isa)
    return next((path for path in (PREBUILT / name, kernels_directory() / name) if path.exists()), None)


def prebuild() -> list[Path]:
    """Compiles the library of every instruction set of this architecture into PREBUILT, for every user to load."""
    compiler, sets = _compiler(), list(_TARGETS.get(platform.machine(), ()))
    made = [PREBUILT / file_name(isa) for isa in sets]
    with locked(PREBUILT), ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_compile, repeat(compiler), map(_target, sets), made))
    for path in (PREBUILT, *made):
        path.chmod(0o755)
    return made


def load(path: Path) -> ctypes.CDLL:
    """Loads the library from a file in a private directory, or in PREBUILT. Raises NotBuilt when it cannot be trusted,
    or was built with another layout."""
    roots = path.parent == PREBUILT
    try:
        directory = open_directory(path.parent, roots=roots)
        try:
            file = open_file(path.name, os.O_RDONLY, directory, path.parent, roots=roots)
        finally:
            os.close(directory)
        # This loads the file that was checked, whatever is at the path by now. The descriptor stays open, because the
        # loader takes two files with the same name for one.
        found = ctypes.CDLL(f"/proc/self/fd/{file}")
    except OSError as error:
        raise NotBuilt(_reason(error, path)) from None
    try:
        version = found.penstock_layout
    except AttributeError:
        raise NotBuilt(f"{path} does not say which layout it was built with") from None
    version.restype = ctypes.c_uint64
    if version() != layout.VERSION:
        raise NotBuilt(f"{path} was built with layout {version():016x}, and layout.py is {layout.VERSION:016x}")
    layout.declare(found)
    return found


def kernels_directory() -> Path:
    """The directory of compiled libraries."""
    return cache_directory("kernels")


def cached(directory: Path, isa: str = "") -> Path:
    """The library in `directory`. Of several processes that want it at once, one compiles and the others wait."""
    path, target = directory / file_name(isa), _target(isa)
    try:
        if path.exists():
            return path
        compiler = _compiler()
        with locked(directory):
            if not path.exists():
                _compile(compiler, target, path)
    except OSError as error:
        raise NotBuilt(_reason(error, directory)) from None
    return path


def file_name(isa: str = "") -> str:
    """The file name of the library for an instruction set; it changes with the sources, the layout and the flags."""
    isa = isa or _best()
    digest = hashlib.sha256(repr((_FLAGS, _target(isa))).encode() + layout.header().encode())
    for name in _SOURCES:
        digest.update((_HERE / name).read_bytes())
    return f"{isa}-{digest.hexdigest()[:24]}.so"


def _compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise NotBuilt("there is no C++ compiler (g++ or clang++)")
    return found


def _best() -> str:
    sets = instruction_sets()
    if not sets:
        raise NotBuilt(f"there are no kernels for {platform.machine()}")
    return sets[0]


def _target(isa: str) -> list[str]:
    return _TARGETS[platform.machine()][isa or _best()].split()


def _compile(compiler: str, target: list[str], path: Path) -> None:
    """Compiles under another name first, so that no process loads half a library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as room:
        part = Path(room) / path.name
        compile_to(part, compiler, target, layout.header())
        part.chmod(0o700)
        os.replace(part, path)


def compile_to(path: Path, compiler: str, target: Sequence[str], header: str) -> None:
    """Compiles the library, with `header` as the layout.h beside it. Raises NotBuilt."""
    (path.parent / "layout.h").write_text(header)
    command = (compiler, *_FLAGS, *target, f"-I{path.parent}", *_COMPILED, "-o", str(path))
    try:
        done = subprocess.run(command, cwd=_HERE, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise NotBuilt(f"{compiler} took more than {_LIMIT_S} s") from None
    if done.returncode:
        raise NotBuilt(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")


def _reason(error: OSError, path: Path) -> str:
    """The error in words, with the file that the system names, or else `path`."""
    return f"{error.filename or path}: {error.strerror or error}"


if __name__ == "__main__":
    print(*(prebuild() if sys.argv[1:] == ["--all"] else [cached(kernels_directory())]), sep="\n")
